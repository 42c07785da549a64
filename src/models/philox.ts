/** Philox on the host, for a few random values by key and counter. */

/** Four 32-bit words of counter (counter, 0, 0) under a 64-bit key: Philox 4x32 of ten rounds (Salmon et al., 2011). */
export function philox4x32(key: bigint, counter: number): [number, number, number, number] {
	let [a, b, c, d] = [counter >>> 0, Math.floor(counter / 2 ** 32), 0, 0];
	let [low, high] = [Number(BigInt.asUintN(32, key)), Number(BigInt.asUintN(32, key >> 32n))];
	for (let round = 0; round < 10; round++) {
		const first = BigInt(a) * 0xd2511f53n;
		const second = BigInt(c) * 0xcd9e8d57n;
		const upper = (product: bigint) => Number(product >> 32n);
		const lower = (product: bigint) => Number(product & 0xffffffffn);
		[a, b, c, d] = [(upper(second) ^ b ^ low) >>> 0, lower(second), (upper(first) ^ d ^ high) >>> 0, lower(first)];
		low = (low + 0x9e3779b9) >>> 0;
		high = (high + 0xbb67ae85) >>> 0;
	}
	return [a, b, c, d];
}
