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
	/** Number of columns that are tokens of the vocabulary; the columns behind them are padding. */
	readonly shard: Pick<VocabularyShard, "live">;
	/** Gathers the statistics of all shards, [shards, 5, T], from this shard's, [1, 5, T]; default: this is the only one. */
	readonly gather?: (own: Tensor) => Tensor;
	/** Tokens whose teacher logits are made at once; default: all. */
	readonly tokensAtOnce?: number;
}

/**
 * The teacher's logits of some tokens, contiguous, f32 or bf16, made when they are needed: once forward, once backward. The
 * receiver disposes them. `keep`: tensors that they are made from.
 */
export interface TeacherLogits {
	readonly of: (firstToken: number, tokens: number) => Tensor;
	readonly keep: readonly Tensor[];
}

/** Logits that are in memory as a whole. */
export function wholeLogits(logits: Tensor): TeacherLogits {
	return { of: (first, tokens) => logits.rowsFrom(first, tokens), keep: [logits] };
}

/**
 * Σ P_t (log P_t − log P_s) of every token, f32 [T]. student_TV contiguous, f32 or bf16. The teacher has no gradient. The
 * student's gradient takes the place of its logits when nothing else holds them.
 */
export function klDivergence(tape: Tape, student: Tensor, teacher: TeacherLogits, options: DivergenceOptions): Tensor {
	const { device } = tape;
	if (!student.contiguous) {
		throw new RangeError(`The divergence takes contiguous logits, not rows ${student.stride} apart.`);
	}
	const loss = Tensor.empty(device, [student.rows]);
	const studentLse = Tensor.empty(device, [student.rows]);
	const teacherLse = Tensor.empty(device, [student.rows]);
	const part = (vector: Tensor, first: number, tokens: number) => vector.columns(first, tokens);
	forEachRun(student, teacher, options, (tokens, first, common) => {
		using statistics = Tensor.empty(device, [1, 5, tokens]);
		device.run("kl_statistics", { ...common, statistics });
		using gathered = options.gather?.(statistics) ?? statistics.share();
		using ownLoss = part(loss, first, tokens);
		using ownStudent = part(studentLse, first, tokens);
		using ownTeacher = part(teacherLse, first, tokens);
		device.run("kl_loss", {
			statistics: gathered,
			loss: ownLoss,
			student_lse: ownStudent,
			teacher_lse: ownTeacher,
			tokens,
			shards: gathered.shape[0]!,
		});
	});
	const y = tape.output(loss, student.gradient !== null);
	tape.record({
		name: "kl_divergence",
		outputs: [y],
		keep: [student, ...teacher.keep],
		own: [studentLse, teacherLse],
		backward: ([dloss]) => {
			const alone = student.allocation.references === 1;
			const dlogits = alone ? student.withGradient(null) : Tensor.empty(device, student.shape, student.dtype);
			forEachRun(student, teacher, options, (tokens, first, common) => {
				using ownLoss = part(dloss!, first, tokens);
				using ownStudent = part(studentLse, first, tokens);
				using ownTeacher = part(teacherLse, first, tokens);
				using into = dlogits.rowsFrom(first, tokens);
				device.run("kl_backward", {
					...common,
					student_lse: ownStudent,
					teacher_lse: ownTeacher,
					dloss: ownLoss,
					dlogits: into,
				});
			});
			student.gradient!.accumulate(dlogits);
		},
	});
	return y;
}

/** Visits runs of at most `tokensAtOnce` tokens with the arguments that all kernels have. */
function forEachRun(
	student: Tensor,
	teacher: TeacherLogits,
	options: DivergenceOptions,
	visit: (tokens: number, first: number, common: ReturnType<typeof commonOf>) => void,
): void {
	const all = student.rows;
	const atOnce = options.tokensAtOnce ?? Math.max(1, all);
	for (let first = 0; first < all; first += atOnce) {
		const tokens = Math.min(atOnce, all - first);
		using own = student.rowsFrom(first, tokens);
		using other = teacher.of(first, tokens);
		visit(tokens, first, commonOf(own, other, options));
	}
}

function commonOf(student: Tensor, teacher: Tensor, { shard, temperature }: DivergenceOptions) {
	if (!teacher.contiguous || student.rows !== teacher.rows || student.width !== teacher.width) {
		throw new RangeError(`A student's logits [${student.shape}] and a teacher's [${teacher.shape}] do not match.`);
	}
	return {
		student,
		teacher,
		tokens: student.rows,
		vocabulary_rows: student.width,
		vocabulary_live: shard.live,
		inverse_temperature: 1 / temperature,
		student_dtype: student.dtypeCode,
		teacher_dtype: teacher.dtypeCode,
	};
}
