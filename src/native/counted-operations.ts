/** The needs of operations on the counting library: memory while they run, and the exchange of an even routing. */
import { Dtype, MlpRecipe, type OperationName } from "./abi.ts";
import { isGatedCode } from "./activations.ts";
import type { OperationValues } from "./counting-library.ts";
import type { DeviceKind } from "./library.ts";

/**
 * Bytes at the operation's peak, of those whose workspace is as large as activations: experts as one operation
 * (ops/grouped_mlp of both libraries), their weight gradients in e4m3, and a projection's rows in e4m3 on a GPU. `values.rows`: those that the library reserves for,
 * which is all that there is memory for on a GPU and the live ones on a processor, whose gradient of the weighted activation is
 * fp32.
 */
export function workspaceBytes(name: OperationName, values: OperationValues, kind: DeviceKind): number {
	if (name === "grouped_gemm_weight_gradient") return weightGradientBytes(values, kind);
	// Rows of one operand, a byte an element and a factor for 128 of them.
	const operand = (columns: number) => (values.rows ?? 0) * (columns + 4 * Math.ceil(columns / 128));
	if (name === "grouped_gemm" && kind === "cuda" && values.recipe === MlpRecipe.e4m3Blockwise)
		return operand(values.k!);
	if (name !== "grouped_mlp_forward" && name !== "grouped_mlp_backward") return 0;
	const { rows = 0, width = 0, hidden = 0, dtype, z, b1, b2 } = values;
	const element = dtype === Dtype.f32 ? 4 : 2;
	const zWidth = isGatedCode(values.kind!) ? 2 * width : width;
	if (kind === "cuda" && values.recipe === MlpRecipe.e4m3Blockwise) {
		// Kernels that know no runs write rows of bf16, which are rounded after them.
		const inSteps = zWidth > width && (values.interleave !== 0 || width % 128 !== 0);
		const steps = inSteps ? rows * (zWidth + width) * 2 : 0;
		// The layer's input may have been rounded where it was written.
		const given = name === "grouped_mlp_backward" ? values.dy_e4m3 : values.x_e4m3;
		const entering = given ? 0 : operand(hidden);
		if (name === "grouped_mlp_backward") {
			return rows * width * 2 + Math.max(entering, values.dz_e4m3 ? steps : operand(zWidth));
		}
		return (z === 0 ? rows * zWidth * 2 : 0) + Math.max(entering, operand(width));
	}
	if (name === "grouped_mlp_backward") {
		// A processor stores rows that leave in e4m3 alone before it rounds them.
		const stored = kind === "cpu" && values.dz_e4m3 ? rows * (zWidth + (values.hs_e4m3 ? width : 0)) * element : 0;
		return rows * width * (kind === "cpu" ? 4 : element) + stored;
	}
	const sums = (columns: number, bias = 0) => (bias !== 0 && element === 2 ? rows * columns * 4 : 0);
	const kept = rows * width * element + (z === 0 ? rows * zWidth * element : 0);
	return kept + Math.max(sums(zWidth, b1), sums(hidden, b2));
}

/** Both operands, rounded: on a GPU turned into blocks of 128 rows, a byte an element, on a processor in fp32. */
function weightGradientBytes(
	{ recipe, rows = 0, groups = 0, n = 0, k = 0 }: OperationValues,
	kind: DeviceKind,
): number {
	if (recipe !== MlpRecipe.e4m3Blockwise) return 0;
	if (kind === "cpu") return rows * (n + k) * 4;
	const blocks = Math.floor(rows / 128) + groups;
	return blocks * (128 * (n + k) + 4 * (n + Math.ceil(k / 128)));
}

// The result of expert_exchange_plan (mimo/ops/moe_dispatch.h), computed by the host: for a library that only counts.

interface ExchangeSizes {
	readonly members: number;
	/** This one. */
	readonly member: number;
	readonly expertTensor: number;
	readonly localExperts: number;
	readonly capacity: number;
	readonly regionRows: number;
}

/** Ranges [members, localExperts, 3] of both ways, and this member's expert offsets, from every member's. */
export function expectedExchange(offsets: Int32Array, sizes: ExchangeSizes) {
	const { members, member: own, expertTensor, localExperts, capacity, regionRows } = sizes;
	const experts = (members / expertTensor) * localExperts;
	const firstExpert = (member: number) => Math.floor(member / expertTensor) * localExperts;
	const first = (member: number, expert: number) => offsets[member * (experts + 1) + expert]!;
	const rows = (member: number, expert: number) => first(member, expert + 1) - first(member, expert);
	/** Where rows of `source` for an expert of `receiver` begin there, and how many have room. */
	const place = (receiver: number, source: number, expert: number) => {
		let before = 0;
		for (let one = firstExpert(receiver); one <= expert; one++) {
			for (let from = 0; from < (one === expert ? source : members); from++) before += rows(from, one);
		}
		return [Math.min(before, capacity), Math.min(Math.max(0, capacity - before), rows(source, expert))] as const;
	};
	const ranges = { outSend: [], outReceive: [], backSend: [], backReceive: [] } as Record<string, number[]>;
	for (let member = 0; member < members; member++) {
		for (let local = 0; local < localExperts; local++) {
			const theirs = firstExpert(member) + local;
			const [to, sent] = place(member, own, theirs);
			ranges.outSend!.push(first(own, theirs), to, sent);
			ranges.backReceive!.push((member % expertTensor) * regionRows + first(own, theirs), to, sent);
			const ours = firstExpert(own) + local;
			const [at, come] = place(own, member, ours);
			ranges.outReceive!.push(at, first(member, ours), come);
			ranges.backSend!.push(at, (own % expertTensor) * regionRows + first(member, ours), come);
		}
	}
	const localOffsets = Array.from({ length: localExperts + 1 }, (_, local) => {
		let before = 0;
		for (let one = 0; one < local; one++) {
			for (let from = 0; from < members; from++) before += rows(from, firstExpert(own) + one);
		}
		return Math.min(before, capacity);
	});
	const table = (name: string) => Int32Array.from(ranges[name]!);
	return {
		outSend: table("outSend"),
		outReceive: table("outReceive"),
		backSend: table("backSend"),
		backReceive: table("backReceive"),
		localOffsets: Int32Array.from(localOffsets),
	};
}
