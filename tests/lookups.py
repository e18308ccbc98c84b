"""The lookup task for tests: tokenised prompts, its reward, a tiny decoder."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from algorithms.branch_replay.lookup import END, LookupConfig, make_tokenizer, rows
from algorithms.branch_replay.prompts import shared_prompt
from algorithms.branch_replay.rewards import exact_match

SMALL = LookupConfig(records=2, filler=3, questions=2, keys=4, values=3, fillers=2)


def end(config=SMALL):
    return make_tokenizer(config).token_to_id(END)


def lookup_prompts(count, config=SMALL, seed=0, split="train"):
    """One `Prompt` for each text, with all of its questions."""
    tokenizer = make_tokenizer(config)
    by_prompt = {}
    for row in rows(config, count, seed, split):
        ids = tokenizer.encode(f"{row['prompt']} {row['question']}").ids
        by_prompt.setdefault(row["prompt"], []).append((row["prompt_id"], ids, row))
    return [shared_prompt(same) for same in by_prompt.values()]


def scorer(config=SMALL):
    tokenizer = make_tokenizer(config)

    def score(question, tokens):
        completion = tokenizer.decode(tokens.tolist())
        return exact_match(question.row["prompt"], completion, question.row)

    return score


def reader(config=SMALL, dtype=torch.float32, seed=0, **changes):
    """A decoder of a few thousand weights."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": make_tokenizer(config).get_vocab_size(),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).to(dtype)


class Kept(torch.optim.SGD):
    """Takes no step, but keeps the gradient that it would take it by."""

    def __init__(self, parameters, lr=0.0):
        super().__init__(parameters, lr=lr)
        self.gradient = {}

    def step(self, closure=None):
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                self.gradient[str(i)] = parameter.grad.clone()
