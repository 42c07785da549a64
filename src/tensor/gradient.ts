/** The gradient of one value, accumulated during a backward pass. */
import type { Device } from "../native/device.ts";
import type { E4m3Form, E4m3Rows } from "./ops/e4m3.ts";
import { axpby, type FloatDtype, Tensor } from "./tensor.ts";

export class GradientSlot {
	#gradient: Tensor | null = null;
	/** The window into a larger gradient, from its first use until the gradient is taken. */
	#opened: Tensor | null = null;
	#inE4m3: E4m3Rows | null = null;
	/** The e4m3 form in which the gradient's consumer wants it, if its producer supports that; null: not in e4m3. */
	wantsE4m3: E4m3Form | null = null;

	/**
	 * A slot for a value of this shape and storage type. `openWindow` makes an owner of a part of a larger gradient,
	 * where this slot's gradient lands when it can (ops/columns.ts).
	 */
	constructor(
		readonly device: Device,
		readonly shape: readonly number[],
		readonly dtype: FloatDtype,
		private readonly openWindow: (() => Tensor) | null = null,
	) {}

	/** Whether a gradient has arrived. */
	get filled(): boolean {
		return this.#gradient !== null;
	}

	/** Memory for a gradient about to be computed; hand it back through accumulate(). Contents are undefined. */
	target(): Tensor {
		if (this.openWindow !== null && this.#opened === null) {
			this.#opened = this.openWindow();
			return this.#opened;
		}
		return Tensor.empty(this.device, this.shape, this.dtype);
	}

	/** As target(), for a kernel that writes contiguous rows: a strided window is copied into later. */
	contiguousTarget(): Tensor {
		const target = this.target();
		if (target.contiguous) return target;
		if (target === this.#opened) this.#opened = null;
		target[Symbol.dispose]();
		return Tensor.empty(this.device, this.shape, this.dtype);
	}

	/** Adds a gradient, which may come rounded too, or be the bytes of `inE4m3` (ops/e4m3.ts); takes ownership of both. */
	accumulate(gradient: Tensor, inE4m3: E4m3Rows | null = null): void {
		const first = this.#gradient === null;
		this.update((previous, target) => {
			if (previous === null) return gradient;
			if (target === previous) {
				axpby(gradient, target, 1, 1);
			} else {
				axpby(previous, target, 1, 0);
				axpby(gradient, target, 1, 1);
			}
			gradient[Symbol.dispose]();
			return target;
		});
		if (first) this.#inE4m3 = inE4m3;
		else inE4m3?.[Symbol.dispose]();
	}

	/**
	 * Adds a gradient inside the operation that computes it: `compute` writes previous + its own into `target`, which is
	 * `previous` itself when it has no other owner. `previous` is null for the first gradient.
	 */
	fuse(compute: (previous: Tensor | null, target: Tensor) => void): void {
		this.update((previous, target) => {
			const into = target ?? this.target();
			compute(previous, into);
			return into;
		});
	}

	private update(next: (previous: Tensor | null, target: Tensor) => Tensor): void {
		// A sum is another value than what was rounded.
		this.takeE4m3()?.[Symbol.dispose]();
		const previous = this.#gradient;
		if (previous?.dtype === "u8") throw new Error("Nothing can be added to a gradient that came in e4m3 alone.");
		let target: Tensor | null = null;
		if (previous !== null) {
			// The window belongs to this slot alone, though the whole gradient owns its memory too.
			const alone = previous === this.#opened || previous.allocation.references === 1;
			target = alone ? previous : this.target();
		}
		this.#gradient = next(previous, target as Tensor);
		if (previous !== null && previous !== this.#gradient) previous[Symbol.dispose]();
	}

	/** Takes the accumulated gradient; null if none arrived. The caller owns it. */
	take(): Tensor | null {
		const gradient = this.#gradient;
		this.#gradient = null;
		this.#opened = null;
		return gradient;
	}

	/** Takes the gradient in e4m3; null if it did not arrive so. The caller owns it. take() leaves it in place. */
	takeE4m3(): E4m3Rows | null {
		const inE4m3 = this.#inE4m3;
		this.#inE4m3 = null;
		return inE4m3;
	}

	/** Releases the gradient accumulated so far. */
	clear(): void {
		this.take()?.[Symbol.dispose]();
		this.takeE4m3()?.[Symbol.dispose]();
	}
}

/**
 * Adds x's gradient inside the operation that computes it, as GradientSlot.fuse; if x has no gradient, `compute` writes to memory that
 * is released.
 */
export function fuseGradient(x: Tensor, compute: (previous: Tensor | null, target: Tensor) => void): void {
	if (x.gradient) {
		x.gradient.fuse(compute);
	} else {
		using unused = Tensor.empty(x.device, x.shape, x.dtype, "workspace");
		compute(null, unused);
	}
}
