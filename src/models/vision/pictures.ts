/**
 * Rows of pictures that the encoder reads as several tiles, as LLaVA-OneVision has them (docs/spec/vision.md §4.8): those of the
 * whole picture, then those of its tiles line by line, without the rows of padding, resized, a learned row behind every line.
 */
import { type Parameter, pickRows, SparseMatrix, spmm, type Tape, type Tensor } from "../../tensor/index.ts";
import type { PatchGrid, Picture } from "../tower.ts";
import { resize } from "../vit/positions.ts";

/** Items of the encoder that a picture is; undefined: one tile, behind which stands one learned row. */
export function tilesOf(picture: Picture | undefined): number {
	return 1 + (picture === undefined ? 0 : picture.tiles.rows * picture.tiles.columns);
}

/** Rows of the text of a picture whose tiles have `rows` each. */
export function rowsOfPicture(picture: Picture | undefined, rows: number): number {
	return rows + (picture === undefined ? 1 : picture.kept.rows * (picture.kept.columns + 1));
}

/** Rows of the text by item, all of a picture's with its first; `rows`: of an item alone. */
export function rowsByItem(grids: readonly PatchGrid[], rows: (grid: PatchGrid) => number): number[] {
	const counts = new Array<number>(grids.length).fill(0);
	for (let item = 0; item < grids.length; item += tilesOf(grids[item]!.picture)) {
		counts[item] = rowsOfPicture(grids[item]!.picture, rows(grids[item]!));
	}
	return counts;
}

/** The projector's rows_RH of the items in `grids` as rows of the text; `newline`: the learned row. */
export function arrangeRows(tape: Tape, rows: Tensor, newline: Parameter, grids: readonly PatchGrid[]): Tensor {
	const { offsets, column, value, newlines } = linesOf(grids);
	using lines = new SparseMatrix(tape.device, { columns: rows.rows, offsets, column, value });
	using ends = new SparseMatrix(tape.device, pickRows(newlines, 1));
	using base = spmm(tape, lines, rows);
	return spmm(tape, ends, newline, { base });
}

/** The matrix that makes rows of the text of the items' rows, and of every row of the text 0 for the learned one, else −1. */
function linesOf(grids: readonly PatchGrid[]) {
	const offsets = [0];
	const column: number[] = [];
	const value: number[] = [];
	const newlines: number[] = [];
	const end = (isNewline: boolean) => {
		offsets.push(column.length);
		newlines.push(isNewline ? 0 : -1);
	};
	let first = 0;
	for (let item = 0; item < grids.length; item += tilesOf(grids[item]!.picture)) {
		const grid = grids[item]!;
		const { picture } = grid;
		const count = grid.rows * grid.columns;
		for (let row = 0; row < count; row++) {
			column.push(first + row);
			value.push(1);
			end(false);
		}
		if (picture === undefined) end(true);
		else {
			const { tiles, window, kept } = picture;
			const [y, x] = [resize(window.rows, kept.rows, kept.rows), resize(window.columns, kept.columns, kept.columns)];
			/** The row of a patch of the tiles together. */
			const at = (down: number, along: number) => {
				const tile = 1 + Math.floor(down / grid.rows) * tiles.columns + Math.floor(along / grid.columns);
				return first + tile * count + (down % grid.rows) * grid.columns + (along % grid.columns);
			};
			for (let i = 0; i < kept.rows; i++) {
				for (let j = 0; j < kept.columns; j++) {
					for (let a = y.offsets[i]!; a < y.offsets[i + 1]!; a++) {
						for (let b = x.offsets[j]!; b < x.offsets[j + 1]!; b++) {
							column.push(at(window.top + y.index[a]!, window.left + x.index[b]!));
							value.push(y.weight[a]! * x.weight[b]!);
						}
					}
					end(false);
				}
				end(true);
			}
		}
		first += tilesOf(picture) * count;
	}
	return {
		offsets: Int32Array.from(offsets),
		column: Int32Array.from(column),
		value: Float32Array.from(value),
		newlines,
	};
}
