/** Text is written as its tokens come, never half a character. */
import { expect, test } from "bun:test";
import { byteTokenizer } from "../../src/data/text/tokenizer.ts";
import { TextStream } from "../../src/inference/run-generate.ts";

function pieces(ids: Iterable<number>, decode = (own: readonly number[]) => byteTokenizer.decode(own)): string[] {
	const written: string[] = [];
	const stream = new TextStream(decode, (text) => written.push(text));
	for (const id of ids) stream.add(id);
	stream.end();
	return written;
}

test("a character of several tokens is written when its last one is there", () => {
	expect(pieces(Buffer.from("aé€😀b"))).toEqual(["a", "é", "€", "😀", "b"]);
});

test("what never becomes a character is written at the end", () => {
	expect(pieces(Buffer.from("a€").subarray(0, 3))).toEqual(["a", "\ufffd"]);
});

test("a space that the decoder leaves out at the beginning is written between words", () => {
	const words = ["one", "two", "three"];
	expect(pieces([0, 1, 2], (ids) => ids.map((id) => words[id]).join(" "))).toEqual(["one", " two", " three"]);
});
