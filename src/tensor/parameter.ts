/**
 * A trainable tensor with its full name, or a frozen one. Its gradient can be zero without zeros in its memory: then
 * the first product of a step is written there, not added, and a reader of the gradient finds zeros before that.
 */
import { E4m3Matrices } from "./ops/e4m3.ts";
import type { Tensor } from "./tensor.ts";

export class Parameter implements Disposable {
	readonly #gradient: Tensor | null;
	/** Whether the gradient is zero, whatever its memory holds. */
	#unwritten = false;
	#inE4m3: E4m3Matrices | null = null;

	constructor(
		/** Megatron's logical name, the one spelling everywhere: Philox key, checkpoints, errors. */
		readonly name: string,
		/** Values that the forward pass reads. */
		readonly value: Tensor,
		/** fp32 gradient; null: frozen. */
		gradient: Tensor | null,
		/** The parameter that this is a part of: its gradient is settled, and its uses are counted; null: it is whole. */
		private readonly of: Parameter | null = null,
	) {
		this.#gradient = gradient;
	}

	/** This parameter, or the one that it is a part of. */
	get whole(): Parameter {
		return this.of ?? this;
	}

	/** Elements [first, first + count) of a vector, with their gradient. The caller disposes it. */
	part(first: number, count: number): Parameter {
		const cut = (vector: Tensor) => {
			using column = vector.view([vector.elements, 1]);
			using rows = column.rowsFrom(first, count);
			return rows.view([count]);
		};
		return new Parameter(this.name, cut(this.value), this.#gradient && cut(this.#gradient), this);
	}

	get shape(): readonly number[] {
		return this.value.shape;
	}

	get trainable(): boolean {
		return this.#gradient !== null;
	}

	/** fp32 gradient, accumulated in place; null: frozen. Asking for it settles it. */
	get mainGradient(): Tensor | null {
		this.settleGradient();
		return this.#gradient;
	}

	/**
	 * Adds to the gradient by an operation that can also write: `product` writes all of `into`, or adds to it where it is
	 * told to accumulate. Does not call it for a frozen parameter.
	 */
	addToGradient(product: (into: Tensor, accumulate: boolean) => void): void {
		if (this.#gradient === null) return;
		this.of?.settleGradient();
		product(this.#gradient, !this.#unwritten);
		this.#unwritten = false;
	}

	/** The gradient is zero from now on; its memory stays as it is until a product is added or the zeros are written. */
	forgetGradient(): void {
		this.#unwritten = this.trainable;
	}

	/** Writes the zeros of a forgotten gradient to which no product was added. */
	settleGradient(): void {
		this.of?.settleGradient();
		if (!this.#unwritten) return;
		this.#gradient!.device.setZero(this.#gradient!, this.#gradient!.bytes);
		this.#unwritten = false;
	}

	/**
	 * The value [experts, rows, columns] or [rows, columns] rounded to e4m3: once, until the value changes. `transposed`: in the other order
	 * too, which only a backward pass reads.
	 */
	inE4m3({ transposed }: { readonly transposed: boolean }): E4m3Matrices {
		this.#inE4m3 ??= new E4m3Matrices(this.value, { transposed });
		if (transposed && this.#inE4m3.transposed === null) this.#inE4m3.transpose(this.value);
		return this.#inE4m3;
	}

	/** Memory of the value was written. */
	valueChanged(): void {
		this.#inE4m3?.[Symbol.dispose]();
		this.#inE4m3 = null;
	}

	[Symbol.dispose](): void {
		this.valueChanged();
		this.value[Symbol.dispose]();
		this.#gradient?.[Symbol.dispose]();
	}
}
