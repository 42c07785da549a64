/** Norms write results past 32 MB another way: the same bits as those of a part of the rows. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const part = 70;

/** y, dx and the sums of `rows` rows of 515 (an odd width: rows begin anywhere in a line). */
function norms(source: Float32Array, rows: number, width: number) {
	using stack = new DisposableStack();
	const some = (values: Float32Array, shape: readonly number[]) => stack.use(Tensor.from(device, values, shape));
	const empty = (shape: readonly number[]) => stack.use(Tensor.zeros(device, shape));
	const x = some(source.subarray(0, rows * width), [rows, width]);
	const [weight, bias] = [some(randomValues(width, 2), [width]), some(randomValues(width, 3), [width])];
	const [y, dx, rstd, mean] = [empty([rows, width]), empty([rows, width]), empty([rows]), empty([rows])];
	const common = { rows, width, dtype: x.dtypeCode, weight_dtype: x.dtypeCode, x, weight };
	const epsilon = 1e-5;
	const rms = { ...common, rstd, group_size: width, x_stride: width, weight_offset: 0 };
	const results: Float32Array[] = [];
	const keep = (tensor: Tensor) => results.push(tensor.toFloat32().slice(0, part * width));
	device.run("rms_norm_forward", { ...rms, residual: null, sum: null, y, y_stride: width, epsilon });
	keep(y);
	const backward = { dy: x, dresidual: y, dx, dweight: null };
	device.run("rms_norm_backward", { ...rms, ...backward, dy_stride: width, dx_stride: width });
	keep(dx);
	device.run("layer_norm_forward", { ...common, residual: null, sum: null, bias, y, mean, rstd, epsilon });
	keep(y);
	device.run("layer_norm_backward", { ...common, ...backward, mean, rstd, dbias: null });
	keep(dx);
	const sum = empty([rows, width]);
	for (const [name, own] of [
		["rms_norm_forward", { ...rms, y_stride: width }],
		["layer_norm_forward", { ...common, bias, mean, rstd }],
	] as const) {
		device.run(name, { ...own, residual: dx, sum, y, epsilon } as never);
		keep(sum);
		keep(y);
	}
	return results;
}

test("results past the caches are those within them", () => {
	const [rows, width] = [16400, 515];
	expect(rows * width * 4).toBeGreaterThan(32 << 20);
	const source = new Float32Array(rows * width);
	const some = randomValues(4099, 1);
	for (let i = 0; i < source.length; i++) source[i] = some[i % some.length]!;
	const large = norms(source, rows, width);
	for (const [i, small] of norms(source, part, width).entries()) expect(large[i]!).toEqual(small);
});
