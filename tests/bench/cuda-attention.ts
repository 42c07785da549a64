/** Attention at the sizes of a 20-layer Nemotron model, its vision tower, Qwen3-30B-A3B, Qwen3-Next and gpt-oss. */
import { Dtype } from "../../src/native/abi.ts";
import { type Case, fromColumn, type Tensors } from "./cuda-case.ts";

const bf16 = Dtype.bf16;

export interface Heads {
	/** Of packed sequences. */
	readonly lengths: readonly number[];
	readonly queries: number;
	readonly keys: number;
	readonly size: number;
	readonly causal: boolean;
	/** Keys that a query sees at most. */
	readonly window?: number;
}

/** Floating-point operations of attention; its gradient has 2.5 times as many. */
export function attentionWork({ lengths, queries, size, causal, window = Infinity }: Heads): number {
	const seen = (length: number) => (length > window ? window * length - window ** 2 / 2 : length ** 2 / 2);
	const pairs = lengths.reduce((sum, length) => sum + (causal ? seen(length) : length ** 2), 0);
	return 4 * queries * size * pairs;
}

/** Attention of a fused projection, and its gradient; what each writes. */
export function attentionCalls(x: Tensors, { lengths, queries, keys, size, causal, window = 0 }: Heads) {
	const { device } = x;
	const tokens = lengths.reduce((a, b) => a + b, 0);
	const groupStride = (queries / keys + 2) * size;
	const stride = keys * groupStride;
	const width = queries * size;
	const qkv = x.random([tokens, stride]);
	const dqkv = x.random([tokens, stride]);
	const [o, dO] = [x.random([tokens, width]), x.random([tokens, width])];
	const lse = x.random([tokens, queries], "f32");
	const [k, v] = [(queries / keys) * size, (queries / keys + 1) * size];
	const ends = lengths.map((_, sequence) => lengths.slice(0, sequence + 1).reduce((a, b) => a + b, 0));
	const common = {
		q: qkv,
		k: fromColumn(qkv, k),
		v: fromColumn(qkv, v),
		lse,
		cu_seqlens: x.integers(Int32Array.of(0, ...ends)),
		sequences: lengths.length,
		tokens,
		max_seqlen: Math.max(...lengths),
		query_heads: queries,
		key_heads: keys,
		head_dim: size,
		value_dim: size,
		token_stride: stride,
		group_stride: groupStride,
		dropout_seed: 0,
		first_token: 0,
		first_head: 0,
		full_heads: queries,
		window,
		softmax_scale: 1 / Math.sqrt(size),
		dropout: 0,
		mask: causal ? 1 : 0,
		dtype: bf16,
	};
	const backward = {
		...common,
		d_o: dO,
		o,
		dq: dqkv,
		dk: fromColumn(dqkv, k),
		dv: fromColumn(dqkv, v),
		d_o_stride: width,
		d_token_stride: stride,
	};
	return {
		forward: { run: () => device.run("attention_forward", { ...common, o }), result: o },
		backward: { run: () => device.run("attention_backward", backward), result: dqkv },
	};
}

export function attentionCases(x: Tensors): Case[] {
	const images = { queries: 16, keys: 16, size: 80, causal: false };
	return [
		{ queries: 32, keys: 8, size: 128, causal: true, count: 1, length: 8192 },
		{ queries: 32, keys: 4, size: 128, causal: true, count: 4, length: 2048 },
		{ queries: 16, keys: 2, size: 256, causal: true, count: 1, length: 8192 },
		{ queries: 64, keys: 8, size: 64, causal: true, count: 1, length: 8192 },
		{ queries: 64, keys: 8, size: 64, causal: true, window: 128, count: 1, length: 8192 },
		{ ...images, queries: 8, keys: 8, count: 1, length: 16384 },
		{ ...images, count: 1, length: 16384 },
		{ ...images, count: 4, length: 4096 },
		{ ...images, count: 16, length: 1024 },
		{ ...images, count: 64, length: 256 },
	].flatMap(({ count, length, ...heads }) => {
		const { queries, keys, size, causal, window }: Omit<Heads, "lengths"> = heads;
		const whole = { ...heads, lengths: new Array<number>(count).fill(length) };
		const { forward, backward } = attentionCalls(x, whole);
		const work = attentionWork(whole);
		const shape = `${count} x ${length}, ${queries}/${keys} heads of ${size}${causal ? ", causal" : ""}${window === undefined ? "" : `, window of ${window}`}`;
		return [
			{ operation: "attention", shape, work, unit: "TFLOP/s", run: forward.run },
			{ operation: "attention backward", shape, work: 2.5 * work, unit: "TFLOP/s", run: backward.run },
		] satisfies Case[];
	});
}
