"""Save a small Llama with a tokenizer of its own, and chats to train it on: the same path, in two minutes on a CPU."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

chats = []
for a in range(10):
    for b in range(10):
        turns = [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
        chats.append(json.dumps({"messages": turns}))
with open("chats.jsonl", "w") as file:
    file.write("\n".join(chats * 3) + "\n")

words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
words.train_from_iterator(
    chats, trainers.BpeTrainer(vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
tokenizer.save_pretrained("small")

config = LlamaConfig(
    vocab_size=len(tokenizer),
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,  # generate() stops at it
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
)
LlamaForCausalLM(config).save_pretrained("small")
