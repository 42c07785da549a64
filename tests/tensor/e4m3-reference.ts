/** Rounding to e4m3 on plain arrays (docs/spec/moe-performance.md §1.7). */

/** The numbers of e4m3 from 0 on, by their codes: 4 bits of exponent with bias 7, 3 of mantissa, 0x7f is NaN. */
export const codes = Array.from({ length: 0x7f }, (_, code) => {
	const [exponent, mantissa] = [code >> 3, code & 7];
	return exponent === 0 ? mantissa * 2 ** -9 : (1 + mantissa / 8) * 2 ** (exponent - 7);
});

export function toE4m3(x: number): number {
	const magnitude = Math.abs(x);
	let best = 0;
	for (let code = 0; code < codes.length; code++) {
		const [nearer, now] = [Math.abs(codes[code]! - magnitude), Math.abs(codes[best]! - magnitude)];
		if (nearer < now || (nearer === now && code % 2 === 0)) best = code;
	}
	return Math.sign(x) * codes[best]!;
}

/** A [rows, width] operand rounded in rectangles of `height` rows and `columns` columns. */
export function rounded(values: ArrayLike<number>, width: number, height: number, columns = 128): Float64Array {
	const result = new Float64Array(values.length);
	const rows = values.length / width;
	for (let top = 0; top < rows; top += height) {
		for (let left = 0; left < width; left += columns) {
			const places: number[] = [];
			for (let r = top; r < Math.min(rows, top + height); r++) {
				for (let c = left; c < Math.min(width, left + columns); c++) places.push(r * width + c);
			}
			const largest = Math.max(...places.map((at) => Math.abs(values[at]!)));
			const factor = largest > 0 ? 2 ** Math.floor(Math.log2(448 / largest)) : 1;
			for (const at of places) result[at] = toE4m3(values[at]! * factor) / factor;
		}
	}
	return result;
}
