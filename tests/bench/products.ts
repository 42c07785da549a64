/** Products of matrices against OpenBLAS's own sgemm at the same shape, on as many threads. */
import { MlpRecipe } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { gemm, type Operand } from "../../src/tensor/ops/linear.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues } from "../support.ts";
import { compare, type Row, row, timed } from "./measure.ts";
import type { Matrix, Openblas } from "./openblas.ts";

const group = "Products against OpenBLAS's sgemm";

function random(device: Device, shape: readonly [number, number], seed: number): Tensor {
	return Tensor.from(device, randomValues(shape[0] * shape[1], seed), shape);
}

function matrix({ tensor, transposed }: Operand): Matrix {
	return { memory: tensor, transposed, stride: tensor.stride };
}

/** A projection y = x Wᵀ of `tokens` tokens, its input gradient and its weight gradient. */
async function projection(device: Device, blas: Openblas, sizes: readonly [number, number, number]): Promise<Row[]> {
	const [tokens, inputs, outputs] = sizes;
	const { threads } = device.describe();
	using x = random(device, [tokens, inputs], 1);
	using w = random(device, [outputs, inputs], 2);
	using dy = random(device, [tokens, outputs], 3);
	using y = Tensor.empty(device, [tokens, outputs]);
	using dx = Tensor.empty(device, [tokens, inputs]);
	using dw = Tensor.zeros(device, [outputs, inputs]);
	const plain = (tensor: Tensor): Operand => ({ tensor, transposed: false });
	const turned = (tensor: Tensor): Operand => ({ tensor, transposed: true });
	const products = [
		["projection", plain(x), turned(w), y, inputs, 0],
		["its input gradient", plain(dy), plain(w), dx, outputs, 0],
		["its weight gradient", turned(dy), plain(x), dw, tokens, 1],
	] as const;
	const rows: Row[] = [];
	for (const [operation, a, b, c, k, beta] of products) {
		const seconds = await compare(
			timed(() => gemm(device, a, b, c, { beta })),
			timed(() => blas.sgemm(c.rows, c.width, k, matrix(a), matrix(b), beta, matrix(plain(c)))),
		);
		const shape = `${c.rows} x ${k} x ${c.width}`;
		rows.push(row({ group, operation, shape, threads, baseline: blas.name, target: 0.9 }, seconds));
	}
	return rows;
}

/** Experts of `rowsEach` tokens against one product of all rows with one matrix. */
async function experts(
	device: Device,
	blas: Openblas,
	sizes: readonly [number, number, number, number],
): Promise<Row[]> {
	const [groups, rowsEach, inputs, outputs] = sizes;
	const { threads } = device.describe();
	const total = groups * rowsEach;
	using x = random(device, [total, inputs], 1);
	using w = random(device, [groups * outputs, inputs], 2);
	using dy = random(device, [total, outputs], 3);
	using y = Tensor.empty(device, [total, outputs]);
	using dx = Tensor.empty(device, [total, inputs]);
	using dw = Tensor.zeros(device, [groups * outputs, inputs]);
	using offsets = Tensor.from(
		device,
		Int32Array.from({ length: groups + 1 }, (_, i) => i * rowsEach),
	);
	const f32 = x.dtypeCode;
	const grouped = (a: Tensor, c: Tensor, transposed: boolean) =>
		device.run("grouped_gemm", {
			a,
			b: w,
			b_factors: null,
			c,
			offsets,
			rows: total,
			groups,
			n: c.width,
			k: a.width,
			transpose_b: Number(transposed),
			recipe: MlpRecipe.plain,
			a_dtype: f32,
			b_dtype: f32,
			c_dtype: f32,
		});
	const weightGradient = () =>
		device.run("grouped_gemm_weight_gradient", {
			dy,
			x,
			dy_factors: null,
			x_factors: null,
			dw,
			offsets,
			rows: total,
			groups,
			n: outputs,
			k: inputs,
			accumulate: 1,
			recipe: MlpRecipe.plain,
			dy_dtype: f32,
			x_dtype: f32,
		});
	const one = (tensor: Tensor, transposed = false): Matrix => ({ memory: tensor, transposed, stride: tensor.stride });
	const cases = [
		[
			"grouped experts",
			() => grouped(x, y, true),
			() => blas.sgemm(total, outputs, inputs, one(x), one(w, true), 0, one(y)),
		],
		[
			"their input gradient",
			() => grouped(dy, dx, false),
			() => blas.sgemm(total, inputs, outputs, one(dy), one(w), 0, one(dx)),
		],
		[
			"their weight gradient",
			weightGradient,
			() => blas.sgemm(outputs, inputs, total, one(dy, true), one(x), 1, one(dw)),
		],
	] as const;
	const rows: Row[] = [];
	const shape = `${groups} of ${rowsEach} x ${inputs} x ${outputs}`;
	for (const [operation, ours, baseline] of cases) {
		const seconds = await compare(timed(ours), timed(baseline));
		const what = { group, operation, shape, threads, baseline: `${blas.name}, one product` };
		rows.push(row({ ...what, target: rowsEach === 64 ? 0.6 : null }, seconds));
	}
	return rows;
}

export async function benchProducts(device: Device, blas: Openblas): Promise<Row[]> {
	blas.setThreads(device.describe().threads);
	const rows: Row[] = [];
	for (const sizes of [
		[1024, 1024, 2048],
		[512, 2688, 1856],
		[1024, 128, 616],
	] as const) {
		rows.push(...(await projection(device, blas, sizes)));
	}
	for (const sizes of [
		[16, 64, 1024, 768],
		[8, 256, 128, 128],
	] as const) {
		rows.push(...(await experts(device, blas, sizes)));
	}
	blas.setThreads(1);
	return rows;
}
