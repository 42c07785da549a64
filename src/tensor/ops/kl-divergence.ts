/**
 * The divergence of a student's distribution over the vocabulary from a teacher's (docs/spec/elastic.md §11), in three steps
 * so that the vocabulary may be cut into shards: statistics of a shard, their combination, the gradient of a shard's logits.
 */
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";
import type { VocabularyShard } from "./cross-entropy.ts";

export interface DivergenceOptions {
	/** Both logits are divided by it. */
	readonly temperature: number;
	/** Columns that are real; those behind are padding and do not exist. */
	readonly shard: Pick<VocabularyShard, "live">;
	/** Gathers the statistics of all shards, [shards, 5, T], from this shard's, [1, 5, T]; default: this is the only one. */
	readonly gather?: (own: Tensor) => Tensor;
}

/**
 * Σ P_t (log P_t − log P_s) of every token, f32 [T]. student_TV and teacher_TV contiguous, f32 or bf16. The teacher has no
 * gradient. The student's gradient takes the place of its logits when nothing else holds them.
 */
export function klDivergence(tape: Tape, student: Tensor, teacher: Tensor, options: DivergenceOptions): Tensor {
	const { device } = tape;
	for (const logits of [student, teacher])
		if (!logits.contiguous)
			throw new RangeError(`The divergence takes contiguous logits, not rows ${logits.stride} apart.`);
	if (student.rows !== teacher.rows || student.width !== teacher.width) {
		throw new RangeError(`A student's logits [${student.shape}] and a teacher's [${teacher.shape}] do not match.`);
	}
	const tokens = student.rows;
	const common = {
		student,
		teacher,
		tokens,
		vocabulary_rows: student.width,
		vocabulary_live: options.shard.live,
		inverse_temperature: 1 / options.temperature,
		student_dtype: student.dtypeCode,
		teacher_dtype: teacher.dtypeCode,
	};
	using statistics = Tensor.empty(device, [1, 5, tokens]);
	device.run("kl_statistics", { ...common, statistics });
	using gathered = options.gather?.(statistics) ?? null;
	const all = gathered ?? statistics;
	const loss = Tensor.empty(device, [tokens]);
	const studentLse = Tensor.empty(device, [tokens]);
	const teacherLse = Tensor.empty(device, [tokens]);
	const shards = all.shape[0]!;
	device.run("kl_loss", { statistics: all, loss, student_lse: studentLse, teacher_lse: teacherLse, tokens, shards });
	const y = tape.output(loss, student.gradient !== null);
	tape.record({
		name: "kl_divergence",
		outputs: [y],
		keep: [student, teacher],
		own: [studentLse, teacherLse],
		backward: ([dloss]) => {
			const alone = student.allocation.references === 1;
			const dlogits = alone ? student.withGradient(null) : Tensor.empty(device, student.shape, student.dtype);
			device.run("kl_backward", {
				...common,
				student_lse: studentLse,
				teacher_lse: teacherLse,
				dloss: dloss!,
				dlogits,
			});
			student.gradient!.accumulate(dlogits);
		},
	});
	return y;
}
