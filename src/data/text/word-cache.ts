/** Words of texts with what the tokenizer library makes of them: most words of a text have come before. */
import { ByteLevelPreTokenizer } from "@huggingface/tokenizers";

/** Words that are kept. */
const MOST_WORDS = 2 ** 17;
/** Characters of the longest word that is kept. */
const LONGEST_WORD = 256;

/** Stands for the library's cache, which has ten thousand words and spends more time on their order than it saves. */
export class WordCache<Value> {
	readonly #values = new Map<string, Value>();

	get(word: string): Value | undefined {
		return this.#values.get(word);
	}

	put(word: string, value: Value): void {
		if (word.length > LONGEST_WORD) return;
		if (this.#values.size >= MOST_WORDS) this.#values.clear();
		this.#values.set(word, value);
	}

	clear(): void {
		this.#values.clear();
	}
}

/** Bytes of words, a character each. */
const bytes = new WordCache<string>();
const { pre_tokenize_text: original } = ByteLevelPreTokenizer.prototype;

ByteLevelPreTokenizer.prototype.pre_tokenize_text = function (text) {
	if (!this.use_regex || this.add_prefix_space) return original.call(this, text);
	return Array.from(text.match(this.pattern) ?? [], (word) => {
		const known = bytes.get(word);
		if (known !== undefined) return known;
		const one = original.call(Object.create(this, { use_regex: { value: false } }), word)[0]!;
		bytes.put(word, one);
		return one;
	});
};
