"""Small tokenizers of every kind, and what the libraries that Megatron-LM reads them with make of texts.

    python tests/reference/tokenizer_references.py tests/golden/tokenizers [NUMBER_OF_RANDOM_TEXTS]

Needs sentencepiece, tiktoken, tokenizers, transformers and zstandard. The models are trained on the documentation and on random
text. GPT2BPETokenizer is transformers' GPT2Tokenizer; TikTokenizer is an Encoding of tiktoken, with Megatron's patterns and its
special tokens before the others; SentencePiece's models are read by the library itself.
"""

import base64
import json
import os
import pathlib
import random
import sys

import sentencepiece
import tiktoken
import zstandard
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

folder = pathlib.Path(sys.argv[1])
number = int(sys.argv[2]) if len(sys.argv) > 2 else 60
root = pathlib.Path(__file__).parents[2]
documentation = "\n".join(path.read_text() for path in sorted(root.glob("docs/*.md")))
random_texts = random.Random(1)

SCRIPTS = [(0x20, 0x7E), (0xA0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x600, 0x6FF), (0x900, 0x97F), (0xE01, 0xE5B),
           (0x1100, 0x11FF), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x2100, 0x214F), (0x2460, 0x24FF), (0x3040, 0x30FF), (0x3300, 0x33FF),
           (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFB00, 0xFB4F), (0xFE00, 0xFEFF), (0xFF00, 0xFFEF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF),
           (0x300, 0x36F), (0x0, 0x1F), (0x7F, 0x9F), (0xE0000, 0xE007F)]
BLANKS = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u0085", "\ufeff", "\u2581", "\u200b", "\u00ad"]
SPECIAL = ["<image>", "[INST]", "<s>", "</s>", "<unk>", "<|endoftext|>", "<SPECIAL_9>", "<0x41>"]


def random_text():
    pieces = []
    for _ in range(random_texts.randint(1, 12)):
        kind = random_texts.random()
        if kind < 0.3:
            begin = random_texts.randrange(len(documentation) - 40)
            pieces.append(documentation[begin : begin + random_texts.randint(1, 40)])
        elif kind < 0.5:
            pieces.append(random_texts.choice(BLANKS))
        elif kind < 0.6:
            pieces.append(random_texts.choice(SPECIAL))
        elif kind < 0.9:
            low, high = random_texts.choice(SCRIPTS)
            pieces.append("".join(chr(random_texts.randint(low, high)) for _ in range(random_texts.randint(1, 6))))
        else:
            code = random_texts.randrange(0x110000)
            pieces.append("" if 0xD800 <= code < 0xE000 or code == 0x10FFFF else chr(code))
    return "".join(pieces)


training = [line for line in documentation.split("\n") if line.strip()] + [random_text().replace("\n", " ") for _ in range(500)]
texts = [
    "Hello world", " Hello   world ", "", " ", "   ", "a", "1234567", "it's 3.5%!", "x  y", "\tif (a) {\n\t\treturn;\n\t}\n\n\n",
    "<image>a [INST] b [/INST] </s>", "<s> <unk> <|endoftext|>", "\u2581\u2581a\u2581b", "ﬁne ① ㌔ Ａｂ　ｃ", "e\u0301 \u00e9 \u0041\u030a",
    "\u0085a\ufeffb\u00a0c\u200bd\u00ade", "👨‍👩‍👧 👍🏽 🇩🇪", "中文分词测试，没有空格。日本語テキスト", "\x00\x01\x7f", "\ufffd\ufffe", documentation[:4000],
    documentation[10000:16000],
]
texts += [random_text() for _ in range(number)]
os.makedirs(folder, exist_ok=True)
results = {"texts": texts, "ids": {}, "decoded": {}}


def save(name, content):
    (folder / (name + ".zst")).write_bytes(zstandard.compress(content, 19))


def scratch(name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def sentencepiece_model(name, **options):
    model = folder / name
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training), model_prefix=str(model), hard_vocab_limit=False, minloglevel=2, **options
    )
    content = pathlib.Path(f"{model}.model").read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    results["ids"][name] = [processor.encode_as_ids(text) for text in texts]
    # Control symbols, which the library leaves out, are in no encoded text.
    results["decoded"][name] = [processor.decode_ids(ids) for ids in results["ids"][name]]
    save(f"{name}.model", content)
    for ending in ("model", "vocab"):
        os.remove(f"{model}.{ending}")


symbols = ["<image>", "[INST]"]
sentencepiece_model("unigram-nfkc", vocab_size=900, model_type="unigram", user_defined_symbols=symbols, character_coverage=0.98)
sentencepiece_model("unigram-bytes", vocab_size=1200, model_type="unigram", byte_fallback=True, normalization_rule_name="identity",
                    treat_whitespace_as_suffix=True, character_coverage=0.98)
sentencepiece_model("bpe-bytes", vocab_size=1200, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
                    remove_extra_whitespaces=False, split_digits=True, user_defined_symbols=symbols, character_coverage=0.98)
sentencepiece_model("bpe-spanning", vocab_size=900, model_type="bpe", normalization_rule_name="identity", add_dummy_prefix=False,
                    split_by_whitespace=False, character_coverage=0.98)
sentencepiece_model("char", vocab_size=800, model_type="char", normalization_rule_name="identity", character_coverage=0.98)

pairs = ByteLevelBPETokenizer()
pairs.train_from_iterator(training, vocab_size=800, special_tokens=["<|endoftext|>"], show_progress=False)
pairs.save_model(str(folder))
gpt2 = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
results["ids"]["gpt2"] = [gpt2(text).input_ids for text in texts]
results["decoded"]["gpt2"] = [gpt2.decode(ids, clean_up_tokenization_spaces=False) for ids in results["ids"]["gpt2"]]

# A tokenizer.json that puts tokens around a text.
pairs.add_special_tokens(["<s>", "</s>"])
whole = json.loads(pairs.to_str())
begin, end = (pairs.token_to_id(token) for token in ("<s>", "</s>"))
whole["post_processor"] = {
    "type": "Sequence",
    "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {"<s>": {"id": "<s>", "ids": [begin], "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [end], "tokens": ["</s>"]}}},
    ],
}
content = json.dumps(whole).encode()
fast = PreTrainedTokenizerFast(tokenizer_file=str(scratch("tokenizer.json", content)))
results["ids"]["hf"] = [fast(text).input_ids for text in texts]
save("tokenizer.json", content)
os.remove(folder / "tokenizer.json")

# Ranks in the order of merges, behind the bytes.
code_of = {chr(code): byte for byte, code in {
    **{b: b for b in [*range(33, 127), *range(161, 173), *range(174, 256)]},
    **{b: 256 + i for i, b in enumerate(b for b in range(256) if not (33 <= b < 127 or 161 <= b < 173 or 174 <= b))},
}.items()}
ranks = {bytes([i]): i for i in range(256)}
for line in (folder / "merges.txt").read_text().split("\n")[1:]:
    if line:
        ranks.setdefault(bytes(code_of[c] for c in line.replace(" ", "")), len(ranks))
entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")} for token, rank in ranks.items()]
save("tiktoken.json", json.dumps(entries).encode())
SPECIALS, VOCABULARY = 20, 700
meanings = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
special = {token: i for i, token in enumerate(meanings + [f"<SPECIAL_{i}>" for i in range(len(meanings), SPECIALS)])}
V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
V2 = rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
for name, pattern in (("v1", V1), ("v2", V2)):
    mergeable = {token: rank + SPECIALS for token, rank in ranks.items() if rank < VOCABULARY - SPECIALS}
    encoding = tiktoken.Encoding(name=name, pat_str=pattern, mergeable_ranks=mergeable, special_tokens=special)
    results["ids"][f"tiktoken-{name}"] = [encoding.encode(text, allowed_special="all") for text in texts]
    results["decoded"][f"tiktoken-{name}"] = [encoding.decode(ids) for ids in results["ids"][f"tiktoken-{name}"]]
for name in ("vocab.json", "merges.txt"):
    save(name, (folder / name).read_bytes())
    os.remove(folder / name)
save("results.json", json.dumps(results).encode())
