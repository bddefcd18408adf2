"""Text: held against transformers' own generate, and against a loop without a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tokenizers
import torch

from tests.infer.small import CPU, loaded, save
from tests.models.small import TRANSFORMERS
from zerofit.data.tokenizer import open_tokenizer
from zerofit.infer.generate import GenerationRequest, Prompt, _TextStreamer, generate, working_bytes
from zerofit.models.build import build
from zerofit.models.catalog import find

PROMPT = tuple(b"def ")
ARGS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def wish(ends=frozenset([256]), decode=bytes, **changes) -> GenerationRequest:
    prompt = Prompt(ids=PROMPT, end_ids=ends, decode=decode)
    return GenerationRequest(
        **{"prompt": prompt, "max_new_tokens": 20, "temperature": 0.0, "top_p": 1.0, "seed": 1, **changes}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save(path / "model", "llama-tiny", {**ARGS, "intermediate_size": 48})
    return path


@pytest.fixture(scope="module")
def model(folder):
    return loaded(folder / "model", 2.0, folder)[0]


def ids_of(model, asked: GenerationRequest) -> list[int]:
    """What is generated, as ids."""
    seen: list[int] = []

    def decode(ids):
        seen[:] = ids
        return "x" * len(ids)

    asked = replace(asked, prompt=replace(asked.prompt, decode=decode))
    assert generate(model, asked, CPU, lambda text: None).tokens in (len(seen), len(seen) + 1)
    return list(seen)


@pytest.mark.versions
def test_greedy_is_the_likeliest_token_each_time(model, folder):
    got = ids_of(model, wish())
    theirs = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=256, pad_token_id=256, use_cache=False
    )
    by_hand = list(PROMPT)
    for _ in range(20):
        by_hand.append(model(torch.tensor([by_hand]), use_cache=False).logits[0, -1].argmax().item())
        if by_hand[-1] == 256:
            break
    assert got == [t for t in theirs[0, len(PROMPT) :].tolist() if t != 256]
    assert got == [t for t in by_hand[len(PROMPT) :] if t != 256]
    from_disk, placement = loaded(folder / "model", 0.0, folder)
    assert "disk" in placement.device_map.values()
    assert ids_of(from_disk, wish()) == got


def test_a_seed_gives_the_same_text_again(model):
    drawn = wish(temperature=1.0)
    assert ids_of(model, drawn) == ids_of(model, drawn)
    assert ids_of(model, drawn) != ids_of(model, wish(temperature=1.0, seed=2))


def test_little_probability_leaves_the_likeliest_token(model):
    assert ids_of(model, wish(temperature=1.0, top_p=1e-6)) == ids_of(model, wish())


def test_an_end_ends(model):
    second = ids_of(model, wish())[1]
    assert len(ids_of(model, wish(ends=frozenset([256, second])))) == 1


@pytest.mark.parametrize("text", ["añb€c𝄞d\n\nx\n", "plain"])
def test_characters_of_several_bytes_come_whole(text):
    said: list[str] = []
    stream = _TextStreamer(wish(decode=open_tokenizer("bytes").decode).prompt, said.append)
    stream.put(torch.tensor([list(b"prompt")]))
    for byte in text.encode():
        stream.put(torch.tensor([byte]))
    stream.put(torch.tensor([256]))
    stream.end()
    assert "".join(said) == stream.text == text
    assert "\ufffd" not in "".join(said)


@pytest.mark.parametrize("spaces", ["byte level", "metaspace"])
def test_a_tokenizer_of_transformers_is_streamed(spaces, tmp_path):
    """What has been said piece by piece is what the whole decodes to, spaces after a line's end too."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    byte_level = spaces == "byte level"
    splitter = tokenizers.pre_tokenizers.ByteLevel() if byte_level else tokenizers.pre_tokenizers.Metaspace()
    made.pre_tokenizer = splitter
    made.decoder = tokenizers.decoders.ByteLevel() if byte_level else tokenizers.decoders.Metaspace()
    text = "The cat sat\n on the mat,\n\n café 東京 and so on\n end"
    special = ["<unk>", "</s>"]
    alphabet = splitter.alphabet() if byte_level else []
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([text] * 3, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    ids = tokenizer.encode(text)
    said: list[str] = []
    stream = _TextStreamer(wish(frozenset([tokenizer.eod_id]), tokenizer.decode).prompt, said.append)
    stream.put(torch.tensor([ids]))
    for token in [*ids, tokenizer.eod_id]:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(said) == stream.text == tokenizer.decode(ids)
    assert len(said) > 5


def test_a_character_that_never_ends_is_said_at_the_end():
    said: list[str] = []
    stream = _TextStreamer(wish(frozenset(), open_tokenizer("bytes").decode).prompt, said.append)
    stream.put(torch.tensor([[1]]))
    stream.put(torch.tensor([0xE2]))
    assert said == []
    stream.end()
    assert said == ["\ufffd"]


@pytest.mark.parametrize("key", ["llama", "gpt2"])
def test_the_cache_is_counted(key):
    """Keys and values of every layer, head and token, as a hand count has them."""
    name, args = TRANSFORMERS[key]
    with torch.device("meta"):
        model = build(find(name), None, {**args, "max_position_embeddings": 4096} if key == "llama" else args).eval()
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    a_token = 2 * 4 * heads * (config.hidden_size // config.num_attention_heads) * config.num_hidden_layers
    short, long = (working_bytes(model, wish(max_new_tokens=most), "cpu") for most in (4, 24))
    assert long - short == pytest.approx(20 * a_token * (1 + 1 / config.num_hidden_layers), rel=0.01)
