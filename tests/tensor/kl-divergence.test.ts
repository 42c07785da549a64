/** The divergence of a student from a teacher over the vocabulary against float64, whole and in shards. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { klDivergence, wholeLogits } from "../../src/tensor/ops/kl-divergence.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { copyInto, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

function reference(
	student: ArrayLike<number>,
	teacher: ArrayLike<number>,
	width: number,
	live: number,
	temperature: number,
) {
	const logs = (logits: ArrayLike<number>, row: number) => {
		const own = Array.from({ length: live }, (_, v) => logits[row * width + v]! / temperature);
		const most = Math.max(...own);
		const lse = most + Math.log(own.reduce((sum, x) => sum + Math.exp(x - most), 0));
		return own.map((x) => x - lse);
	};
	return Float64Array.from({ length: student.length / width }, (_, row) => {
		const [s, t] = [logs(student, row), logs(teacher, row)];
		return t.reduce((sum, log, v) => sum + Math.exp(log) * (log - s[v]!), 0);
	});
}

for (const [name, width, live, temperature, tokensAtOnce] of [
	["every column", 37, 37, 1, 6],
	["behind which padding stands, tempered, some tokens at once", 40, 33, 2.5, 4],
] as const) {
	test(name, () => {
		const teacher = randomValues(6 * width, 8, 4);
		using logits = Tensor.from(device, teacher, [6, width]);
		checkGradients(device, {
			inputs: { student: { values: randomValues(6 * width, 7, 4), shape: [6, width] } },
			forward: (tape, x) =>
				klDivergence(tape, x.student!, wholeLogits(logits), { temperature, shard: { live }, tokensAtOnce }),
			reference: ({ student }) => reference(student!, teacher, width, live, temperature),
			tolerance: 4e-5,
		});
	});
}

test("shards of the vocabulary give what the whole gives, and equal logits nothing", () => {
	const [tokens, width, cut] = [5, 24, 16];
	const [student, teacher] = [randomValues(tokens * width, 1, 5), randomValues(tokens * width, 2, 5)];
	using wholeStudent = Tensor.from(device, student, [tokens, width]);
	using wholeTeacher = Tensor.from(device, teacher, [tokens, width]);
	const tape = new Tape(device, { recording: false });
	const part = (whole: Tensor, from: number, count: number) => {
		using window = whole.columns(from, count);
		const own = Tensor.empty(device, [tokens, count]);
		copyInto(window, own);
		return own;
	};
	const kept: Tensor[] = [];
	for (const [from, count] of [
		[0, cut],
		[cut, width - cut],
	] as const) {
		using s = part(wholeStudent, from, count);
		using t = part(wholeTeacher, from, count);
		const keep = (own: Tensor) => {
			kept.push(own.share());
			return own.share();
		};
		klDivergence(tape, s, wholeLogits(t), { temperature: 1, shard: { live: count }, gather: keep })[Symbol.dispose]();
	}
	using both = Tensor.empty(device, [2, 5, tokens]);
	for (const [at, own] of kept.entries()) {
		using row = both.view([2, 5 * tokens]).rowsFrom(at, 1);
		using flat = own.view([1, 5 * tokens]);
		copyInto(flat, row);
	}
	using loss = klDivergence(tape, wholeStudent, wholeLogits(wholeTeacher), {
		temperature: 1,
		shard: { live: width },
		gather: () => both.share(),
	});
	expect(relativeRms(loss.toFloat32(), reference(student, teacher, width, width, 1))).toBeLessThan(1e-5);
	using none = klDivergence(tape, wholeStudent, wholeLogits(wholeStudent), { temperature: 1, shard: { live: width } });
	expect(Math.max(...none.toFloat32().map(Math.abs))).toBeLessThan(2e-6);
	for (const own of kept) own[Symbol.dispose]();
});
