/** The divergence of a student from a teacher over the vocabulary against float64, whole and in shards. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { klDivergence, wholeLogits } from "../../src/tensor/ops/kl-divergence.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { copyInto, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

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

describe("shards of student and teacher, of which the last has padding", () => {
	const [tokens, cut, width, live, temperature] = [5, 16, 28, 23, 1.7];
	const [student, teacher] = [randomValues(tokens * width, 1, 5), randomValues(tokens * width, 2, 5)];
	const shards = [
		{ from: 0, count: cut, live: cut },
		{ from: cut, count: width - cut, live: live - cut },
	];
	/** Columns of a matrix [tokens, width]. */
	const columns = (values: ArrayLike<number>, from: number, count: number) =>
		Float32Array.from(
			{ length: tokens * count },
			(_, i) => values[Math.floor(i / count) * width + from + (i % count)]!,
		);
	const shardLogits = (values: ArrayLike<number>, { from, count }: (typeof shards)[number]) =>
		Tensor.from(device, columns(values, from, count), [tokens, count]);

	test.each([0, 1])("shard %d has its part of the gradient of float64, and the loss of all", (at) => {
		const own = shards[at]!;
		const other = shards[1 - at]!;
		const tape = new Tape(device, { recording: false });
		let statistics: Tensor | null = null;
		using otherStudent = shardLogits(student, other);
		using otherTeacher = shardLogits(teacher, other);
		klDivergence(tape, otherStudent, wholeLogits(otherTeacher), {
			temperature,
			shard: other,
			gather: (all) => {
				statistics = all.share();
				return all.share();
			},
		})[Symbol.dispose]();
		using ofOther = statistics!;
		const gather = (mine: Tensor) => {
			const both = Tensor.empty(device, [2, 5, tokens]);
			using rows = both.view([2, 5 * tokens]);
			for (const [row, part] of [mine, ofOther].entries()) {
				using to = rows.rowsFrom(row === 0 ? at : 1 - at, 1);
				using from = part.view([1, 5 * tokens]);
				copyInto(from, to);
			}
			return both;
		};
		using ownTeacher = shardLogits(teacher, own);
		checkGradients(device, {
			inputs: { student: { values: columns(student, own.from, own.count), shape: [tokens, own.count] } },
			forward: (recorded, x) =>
				klDivergence(recorded, x.student!, wholeLogits(ownTeacher), { temperature, shard: own, gather }),
			reference: (values) => {
				const whole = Float64Array.from(student);
				for (let i = 0; i < tokens * own.count; i++)
					whole[Math.floor(i / own.count) * width + own.from + (i % own.count)] = values.student![i]!;
				return reference(whole, teacher, width, live, temperature);
			},
			tolerance: 4e-5,
		});
	});
});

test("equal logits diverge by nothing", () => {
	using logits = Tensor.from(device, randomValues(5 * 24, 2, 5), [5, 24]);
	const tape = new Tape(device, { recording: false });
	using none = klDivergence(tape, logits, wholeLogits(logits), { temperature: 1, shard: { live: 24 } });
	expect(Math.max(...none.toFloat32().map(Math.abs))).toBeLessThan(2e-6);
});
