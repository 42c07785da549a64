/** How far a student's hidden states are from a teacher's, token by token (docs/spec/elastic.md §11). */
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

/** cosine: 1 less the cosine of the angle between both. mse: the mean of squared differences. */
export type HiddenLossName = "cosine" | "mse";

/**
 * student_TH, teacher_TH, f32 or bf16 each → loss_T in fp32. The teacher has no gradient. `factor`: of the gradient, asked for when it is
 * computed.
 */
export function hiddenLoss(
	tape: Tape,
	student: Tensor,
	teacher: Tensor,
	{ kind, factor = () => 1 }: { readonly kind: HiddenLossName; readonly factor?: () => number },
): Tensor {
	const { device } = tape;
	const { rows: tokens, width } = student;
	if (teacher.rows !== tokens || teacher.width !== width) {
		throw new RangeError(
			`A student's hidden states [${student.shape}] and a teacher's [${teacher.shape}] do not match.`,
		);
	}
	const [own, other] = [contiguous(student), contiguous(teacher)];
	const args = {
		...{ student: own, teacher: other, tokens, width, cosine: kind === "cosine" ? 1 : 0 },
		...{ student_dtype: own.dtypeCode, teacher_dtype: other.dtypeCode },
	};
	const loss = tape.output(Tensor.empty(device, [tokens]), student.gradient !== null);
	device.run("hidden_loss_forward", { ...args, loss });
	tape.record({
		name: "hidden_loss",
		outputs: [loss],
		own: [own, other],
		backward: ([dloss]) => {
			const dstudent = student.gradient!.contiguousTarget();
			device.run("hidden_loss_backward", { ...args, dloss: dloss!, dstudent, factor: factor() });
			student.gradient!.accumulate(dstudent);
		},
	});
	return loss;
}
