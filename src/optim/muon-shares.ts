/**
 * How the matrices of a flat buffer are dealt out over the ranks that hold parts of them (docs/spec/runtime.md §4.5). Of members t + T d
 * (T tensor-parallel ranks, D replicas) those of equal t hold equal bytes at equal places, and with ZeRO-1 the slice d of them is
 * updated by one. Every member gets a run of the buffer's local matrices, of about equal work, and all T parts of that run: so what
 * any member sends to another is one range, and most of a replica's slice stays where it is.
 */
import type { BufferEntry, RowRanges } from "../parallel/index.ts";
import { flopsOf } from "./newton-schulz.ts";
import type { OptimizerShard } from "./optimizer.ts";

/** Neighbouring local matrices of one parameter, [count, rows, columns]. */
export interface MatrixStack extends Pick<MatrixForm, "rows" | "columns" | "cut" | "period" | "matrices"> {
	readonly count: number;
	/** First element, in the member's run. */
	readonly offset: number;
}

interface MatrixForm {
	/** Of a member's part. */
	readonly rows: number;
	readonly columns: number;
	readonly cut: 0 | 1 | null;
	/** Rows after which blocks of rows repeat. */
	readonly period: number;
	readonly matrices: readonly MatrixRows[];
}

/** Rows [begin, begin + rows) of every period, which together make a matrix. */
export interface MatrixRows {
	readonly begin: number;
	readonly rows: number;
}

/** A member's work, and the ranges of elements that it exchanges with each member. */
export interface Share {
	/** Parts of a matrix, T. */
	readonly parts: number;
	/** Elements of a part of the run; parts lie one after the other. */
	readonly elements: number;
	readonly stacks: readonly MatrixStack[];
	/** Of the buffer, to the members that iterate; and of the parts, from the members that hold them. */
	readonly given: RowRanges;
	readonly taken: RowRanges;
	/** The way back: of the parts, and of the buffer. */
	readonly returned: RowRanges;
	readonly got: RowRanges;
}

type Range = readonly [begin: number, end: number];

/** The share of the rank that holds `shard`; `steps`: of its iterations. */
export function dealMatrices({ replica, buffer }: OptimizerShard, steps: number): Share {
	const group = replica.matrixGroupOf(buffer);
	const replicas = replica.groupOf(buffer).size;
	const parts = group.size / replicas;
	const { elements, entries } = buffer;
	const bounds = boundsOf(entries, { members: group.size, parts, elements, steps });
	const run = (member: number): Range => [bounds[member]!, bounds[member + 1]!];
	const slice = (member: number): Range => {
		const place = Math.floor(member / parts);
		return [(place * elements) / replicas, ((place + 1) * elements) / replicas];
	};
	const own = run(group.rank);
	const length = own[1] - own[0];
	const sharded = replica.distributedOptimizer;
	/** What `member` gives of its buffer to the one that iterates. */
	const given = (member: number, worker: number): Range => {
		if (sharded) return common(slice(member), run(worker));
		return Math.floor(member / parts) === Math.floor(worker / parts) ? run(worker) : [0, 0];
	};
	const got = (member: number, worker: number): Range => (sharded ? given(member, worker) : run(worker));
	const members = Array.from({ length: group.size }, (_, member) => member);
	const inParts = (of: (member: number, worker: number) => Range) =>
		rangesOf(members.map((member) => moved(of(member, group.rank), (member % parts) * length - own[0])));
	return {
		parts,
		elements: length,
		stacks: entries.flatMap((entry) => stacksOf(entry, parts, own)),
		given: rangesOf(members.map((worker) => given(group.rank, worker))),
		taken: inParts(given),
		returned: inParts(got),
		got: rangesOf(members.map((worker) => got(group.rank, worker))),
	};
}

function common([a, b]: Range, [c, d]: Range): Range {
	const begin = Math.max(a, c);
	return [begin, Math.max(begin, Math.min(b, d))];
}

function moved([begin, end]: Range, by: number): Range {
	return begin === end ? [0, 0] : [begin + by, end + by];
}

function rangesOf(ranges: readonly Range[]): RowRanges {
	return {
		offsets: ranges.map(([begin, end]) => (begin === end ? 0 : begin)),
		counts: ranges.map(([begin, end]) => end - begin),
	};
}

/** The first elements of every member's run, and the end of the last: runs of whole local matrices with about equal work. */
function boundsOf(
	entries: readonly BufferEntry[],
	{ members, parts, elements, steps }: { members: number; parts: number; elements: number; steps: number },
): number[] {
	const units = entries.flatMap((entry) => {
		const form = formOf(entry);
		const work = workOf(form, form.cut === null ? 1 : parts, steps);
		const size = form.rows * form.columns;
		return Array.from({ length: entry.elements / size }, (_, index) => ({ offset: entry.offset + index * size, work }));
	});
	const total = units.reduce((sum, { work }) => sum + work, 0);
	const bounds = [0];
	let before = 0;
	for (const { offset, work } of units) {
		const member = Math.min(members - 1, Math.floor(((before + work / 2) / total) * members));
		while (bounds.length <= member) bounds.push(offset);
		before += work;
	}
	while (bounds.length <= members) bounds.push(elements);
	return bounds;
}

function formOf({ shape, matrix }: BufferEntry): MatrixForm {
	const [rows, columns] = shape.slice(-2) as [number, number];
	const heights = matrix!.parts ?? [rows];
	let begin = 0;
	const matrices = heights.map((height) => {
		begin += height;
		return { begin: begin - height, rows: height };
	});
	return { rows, columns, cut: matrix!.cut, period: begin, matrices };
}

/** FLOPs of all iterations on a local matrix's whole ones, of `parts` parts. */
function workOf({ rows, columns, cut, period, matrices }: MatrixForm, parts: number, steps: number): number {
	const [below, beside] = cut === 0 ? [parts, 1] : [1, parts];
	return matrices.reduce((sum, one) => sum + flopsOf((below * one.rows * rows) / period, beside * columns, steps), 0);
}

/** The stacks of a parameter in a run of the buffer. */
function stacksOf(entry: BufferEntry, parts: number, [begin, end]: Range): MatrixStack[] {
	const form = formOf(entry);
	const size = form.rows * form.columns;
	const first = Math.max(0, Math.ceil((begin - entry.offset) / size));
	const last = Math.min(entry.elements / size, Math.floor((end - entry.offset) / size));
	if (first >= last) return [];
	const cut = parts === 1 ? null : form.cut;
	return [{ ...form, cut, count: last - first, offset: entry.offset + first * size - begin }];
}
