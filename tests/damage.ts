/** Seeded damage to bytes, for tests that feed it to every reader. */

export type Random = (bound: number) => number;

/** Repeatable whole numbers below a bound. */
export function generator(seed: number): Random {
	let state = seed >>> 0;
	return (bound) => {
		state = (state + 0x6d2b79f5) >>> 0;
		let t = Math.imul(state ^ (state >>> 15), 1 | state);
		t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
		return ((t ^ (t >>> 14)) >>> 0) % bound;
	};
}

/** Damages a text in one to four places: bits, bytes, lengths, cuts, repeats. */
export function damage(original: Uint8Array, random: Random): Uint8Array {
	let bytes = new Uint8Array(original);
	for (let n = 1 + random(4); n > 0 && bytes.length > 0; n--) {
		const at = random(bytes.length);
		switch (random(7)) {
			case 0:
				bytes[at]! ^= 1 << random(8);
				break;
			case 1:
				bytes[at] = random(256);
				break;
			case 2:
				bytes.fill([0, 0xff, 0x7f, 0x80][random(4)]!, at, at + 1 + random(8));
				break;
			case 3:
				bytes = bytes.slice(0, at);
				break;
			case 4:
				bytes = new Uint8Array(Buffer.concat([bytes.subarray(0, at), bytes.subarray(at + 1 + random(16))]));
				break;
			case 5: {
				const length = 1 + random(32);
				const from = random(bytes.length);
				bytes = new Uint8Array(
					Buffer.concat([bytes.subarray(0, at), bytes.subarray(from, from + length), bytes.subarray(at)]),
				);
				break;
			}
			default:
				bytes = new Uint8Array(Buffer.concat([bytes.subarray(0, at), Buffer.of(random(256)), bytes.subarray(at)]));
		}
	}
	return bytes;
}
