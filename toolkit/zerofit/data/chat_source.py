"""Sources of conversations, in any kind of file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from zerofit.data.chat_records import ChatForm, ChatMessages
from zerofit.data.text_sources import Source
from zerofit.spec.errors import Problem


class ChatPiece(NamedTuple):
    """One conversation of a source."""

    conversation: ChatMessages
    where: str  # for messages about it
    held_out: bool  # it is validation data


class ChatSource(Source):
    """Conversations, in a fixed order."""

    form: ChatForm

    @abstractmethod
    def pieces(self, documents: int) -> Iterator[ChatPiece | Problem]:
        """Yield all conversations, and for each invalid record the reason."""
