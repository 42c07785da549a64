/** The state of a training between two steps: weights, the optimizer's state, the routers' biases of this rank. */
import type { Tensor } from "../tensor/index.ts";
import type { TrainingState } from "../train/step.ts";

export type Trained = Pick<TrainingState, "replicas" | "language" | "optimizer" | "scalars">;

/** In host memory. Every rank takes and restores its own. */
export class Snapshot {
	readonly #contents: readonly { readonly tensor: Tensor; readonly bytes: Uint8Array }[];

	constructor(private readonly state: Trained) {
		const { device } = state.scalars;
		this.#contents = tensorsOf(state).map((tensor) => {
			const bytes = new Uint8Array(tensor.bytes);
			device.copyToHost(bytes, tensor);
			return { tensor, bytes };
		});
	}

	restore(): void {
		const { device } = this.state.scalars;
		for (const { tensor, bytes } of this.#contents) device.copyToDevice(tensor, bytes);
	}
}

function tensorsOf({ replicas, language, optimizer, scalars }: Trained): Tensor[] {
	return [
		...replicas
			.flatMap(({ parameters }) => parameters.buffers.filter(({ frozen }) => !frozen))
			.map(({ values }) => values),
		...optimizer.shards.flatMap(({ buffer, master, expAvg, expAvgSq }) => [
			...(buffer.dtype === "f32" ? [] : [master]),
			expAvg,
			expAvgSq,
		]),
		...[...(language?.model.routers.values() ?? [])].map(({ expertBias }) => expertBias),
		scalars.step,
	];
}
