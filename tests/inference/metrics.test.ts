import { expect, test } from "bun:test";
import { type Metric, scoreOf } from "../../src/inference/metrics.ts";

test.each<[Metric, string, readonly string[], number]>([
	["exact_match", " a cat\n", ["a cat"], 1],
	["exact_match", "A cat", ["a cat"], 0],
	["exact_match", "b", ["a", "b"], 1],
	["accuracy", "The cat.", ["a  CAT"], 1],
	["accuracy", "3.5 kg!", ["35 kg"], 1],
	["accuracy", "cats", ["cat"], 0],
	["accuracy", "an then", ["then"], 1],
	// The values of lmms-eval's anls.
	["anls", "Hello   World", ["hello world"], 1],
	["anls", "hello", ["helo"], 0.8],
	["anls", "kitten", ["sitting"], 1 - 3 / 7],
	["anls", "abcd", ["abxy"], 0.5],
	["anls", "abc", ["axy"], 0],
	["anls", "cat", ["dog", "cats"], 0.75],
	["anls", "", ["dog"], 0],
	["anls", "naïve 🐈", ["naive 🐈"], 1 - 1 / 7],
])("%s of %j with %j is %d", (metric, text, answers, expected) => {
	expect(scoreOf(metric, text, answers)).toBeCloseTo(expected, 12);
});
