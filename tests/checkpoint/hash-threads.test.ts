/** Hashes of other threads are those of this one, however the bytes come. */
import { expect, test } from "bun:test";
import { slotBytes, slotCount } from "../../src/checkpoint/hash-ring.ts";
import { HashThreads } from "../../src/checkpoint/hash-threads.ts";

test("streams of any length, in pieces of any length", () => {
	const noise = crypto.getRandomValues(new Uint8Array(2 ** 16));
	const lengths = [0, 1, 65_535, slotBytes, slotBytes + 1, 3 * slotBytes * slotCount + 17, 0, 5];
	using threads = new HashThreads();
	const expected = lengths.map((length, index) => {
		const bytes = new Uint8Array(length);
		for (let at = 0; at < length; at += noise.length - index) {
			bytes.set(noise.subarray(index, index + Math.min(noise.length - index, length - at)), at);
		}
		for (let at = 0, step = 1; at < length; at += step, step = (step * 7) % (2 * slotBytes)) {
			threads.update(bytes.subarray(at, at + step));
		}
		threads.end();
		return new Bun.CryptoHasher("sha256").update(bytes).digest("hex");
	});
	expect(threads.digests()).toEqual(expected);
});

test("bytes that lie in what was lent, of whole and of short pieces", () => {
	using threads = new HashThreads();
	const expected: string[] = [];
	for (let stream = 0; stream < 5; stream++) {
		const hasher = new Bun.CryptoHasher("sha256");
		for (let piece = 0; piece < slotCount; piece++) {
			const bytes = threads.lend().subarray(0, piece % 3 === 0 ? slotBytes : 1000 + piece);
			bytes.fill(stream * slotCount + piece);
			hasher.update(bytes);
			threads.update(bytes);
		}
		// Lent, and not used.
		threads.lend();
		threads.end();
		expected.push(hasher.digest("hex"));
	}
	expect(threads.digests()).toEqual(expected);
});

test("more streams than a ring has slots; digests may be asked for in between", () => {
	using threads = new HashThreads();
	const expected: string[] = [];
	for (let stream = 0; stream < 3 * slotCount; stream++) {
		const bytes = new Uint8Array(stream % 5).fill(stream);
		threads.update(bytes);
		threads.end();
		expected.push(new Bun.CryptoHasher("sha256").update(bytes).digest("hex"));
		if (stream % 40 === 7) expect(threads.digests()).toEqual(expected);
	}
	expect(threads.digests()).toEqual(expected);
});
