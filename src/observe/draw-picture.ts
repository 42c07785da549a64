/** Draws pictures with characters, for terminals. */

/** Characters from dark to light. */
const shades = " .:-=+*#%@";

/**
 * The lines of a grey picture, scaled to its range of values, where a character covers two columns of four rows. `valueAt`: the
 * value of a pixel, any finite number; pixels outside are dark.
 */
export function drawPicture(height: number, width: number, valueAt: (row: number, column: number) => number): string[] {
	const values = Array.from({ length: height * width }, (_, i) => valueAt(Math.floor(i / width), i % width));
	const low = values.reduce((a, b) => Math.min(a, b), Number.POSITIVE_INFINITY);
	const range = values.reduce((a, b) => Math.max(a, b), low) - low || 1;
	const shade = (row: number, column: number) => {
		let sum = 0;
		for (let y = row; y < Math.min(row + 4, height); y++) {
			for (let x = column; x < Math.min(column + 2, width); x++) sum += (values[y * width + x]! - low) / range;
		}
		return shades[Math.min(shades.length - 1, Math.floor((sum / 8) * shades.length))]!;
	};
	return Array.from({ length: Math.ceil(height / 4) }, (_, line) =>
		Array.from({ length: Math.ceil(width / 2) }, (_, at) => shade(4 * line, 2 * at))
			.join("")
			.trimEnd(),
	);
}
