/** Hashes of another thread are those of this one, however the bytes come. */
import { expect, test } from "bun:test";
import { slotBytes, slotCount } from "../../src/checkpoint/hash-ring.ts";
import { HashThread } from "../../src/checkpoint/hash-thread.ts";

test("streams of any length, in pieces of any length", () => {
	const noise = crypto.getRandomValues(new Uint8Array(2 ** 16));
	const lengths = [0, 1, 65_535, slotBytes, slotBytes + 1, 3 * slotBytes * slotCount + 17, 0, 5];
	using thread = new HashThread(lengths.length);
	const expected = lengths.map((length, index) => {
		const bytes = new Uint8Array(length);
		for (let at = 0; at < length; at += noise.length - index) {
			bytes.set(noise.subarray(index, index + Math.min(noise.length - index, length - at)), at);
		}
		for (let at = 0, step = 1; at < length; at += step, step = (step * 7) % (2 * slotBytes)) {
			thread.update(bytes.subarray(at, at + step));
		}
		thread.end();
		return new Bun.CryptoHasher("sha256").update(bytes).digest("hex");
	});
	expect(thread.digests()).toEqual(expected);
});

test("digests are asked for when all streams have ended", () => {
	using thread = new HashThread(2);
	thread.update(Uint8Array.of(1));
	thread.end();
	expect(() => thread.digests()).toThrow("1 of 2 hashed streams have ended");
});
