/** A trainable tensor with its full name, or a frozen one. */
import type { Tensor } from "./tensor.ts";

export class Parameter implements Disposable {
	constructor(
		/** Megatron's logical name, the one spelling everywhere: Philox key, checkpoints, errors. */
		readonly name: string,
		/** What forward reads. */
		readonly value: Tensor,
		/** fp32 gradient, accumulated in place; null: frozen. */
		readonly mainGradient: Tensor | null,
	) {}

	get shape(): readonly number[] {
		return this.value.shape;
	}

	get trainable(): boolean {
		return this.mainGradient !== null;
	}

	[Symbol.dispose](): void {
		this.value[Symbol.dispose]();
		this.mainGradient?.[Symbol.dispose]();
	}
}
