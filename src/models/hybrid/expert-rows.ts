/** Token copies on their way to their experts and back: in this rank's memory, or over the ranks that hold experts. */
import { Exchange, type ExchangeMembers, startCombine, startDispatch } from "../../parallel/expert-parallel.ts";
import type { Travelling } from "../../parallel/travel.ts";
import type { E4m3Rows } from "../../tensor/ops/e4m3-rows.ts";
import { type ExpertOrder, type PermutedRows, permute, unpermute } from "../../tensor/ops/permute.ts";
import type { Routing } from "../../tensor/ops/router.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";

/** Rows of this rank's experts, side by side by expert. */
export interface ExpertRows extends Disposable {
	readonly rows: Tensor;
	/** The same in e4m3; null: they are not wanted so, or have travelled. */
	readonly inE4m3: E4m3Rows | null;
	/** f32: the routing weight of every row. */
	readonly rowProbability: Tensor;
	/** i32 [local experts + 1]: first row of every expert. */
	readonly offsets: Tensor;
}

/** The four moments of a layer's rows; dispatch has been started when it is made. Each is called once, in this order. */
export interface RowJourney extends Disposable {
	finishDispatch(): ExpertRows;
	startCombine(outputs: Tensor): void;
	/** y_TW = Σ over a token's experts of their outputs. */
	finishCombine(): Tensor;
}

/** Where this rank holds every expert: nothing travels. Takes the order over. */
export class LocalRows implements RowJourney {
	/** null: finishDispatch has handed them over. */
	#permuted: PermutedRows | null;
	#outputs: Tensor | null = null;

	constructor(
		private readonly tape: Tape,
		u: Tensor,
		{ probabilities }: Pick<Routing, "probabilities">,
		private readonly order: ExpertOrder,
		/** Whether the experts read rows in e4m3. */
		inE4m3: boolean,
	) {
		this.#permuted = permute(tape, u, probabilities, order, { inE4m3 });
	}

	finishDispatch(): ExpertRows {
		const permuted = this.#permuted!;
		this.#permuted = null;
		return expertRows({ ...permuted, offsets: this.order.offsets });
	}

	startCombine(outputs: Tensor): void {
		this.#outputs = outputs.share();
	}

	finishCombine(): Tensor {
		return unpermute(this.tape, this.#outputs!, this.order);
	}

	[Symbol.dispose](): void {
		const { rows, inE4m3, rowProbability } = this.#permuted ?? { rows: null, inE4m3: null, rowProbability: null };
		for (const owned of [rows, inE4m3, rowProbability, this.#outputs, this.order]) owned?.[Symbol.dispose]();
	}
}

/** Over the ranks of an expert-parallel group. Takes the order over. */
export class RowExchange implements RowJourney {
	readonly #exchange: Exchange;
	readonly #dispatch: Travelling;
	#combine: Travelling | null = null;

	constructor(
		private readonly tape: Tape,
		u: Tensor,
		{ probabilities }: Pick<Routing, "probabilities">,
		private readonly order: ExpertOrder,
		parallel: ExchangeMembers,
		overflow: Tensor | null,
	) {
		const { rows, rowProbability } = permute(tape, u, probabilities, order);
		using sentRows = rows;
		using sentProbability = rowProbability;
		this.#exchange = Exchange.plan(tape, order, parallel, overflow);
		this.#dispatch = startDispatch(tape, { rows: sentRows, beside: sentProbability }, this.#exchange);
	}

	finishDispatch(): ExpertRows {
		const { rows, beside } = this.#dispatch.finish();
		return expertRows({ rows, inE4m3: null, rowProbability: beside!, offsets: this.#exchange.offsets });
	}

	startCombine(outputs: Tensor): void {
		this.#combine = startCombine(this.tape, outputs, this.#exchange);
	}

	finishCombine(): Tensor {
		using rows = this.#combine!.finish().rows;
		return unpermute(this.tape, rows, this.order);
	}

	[Symbol.dispose](): void {
		for (const owned of [this.#exchange, this.#dispatch, this.#combine, this.order]) owned?.[Symbol.dispose]();
	}
}

/** Takes over all but the offsets. */
function expertRows({ rows, inE4m3, rowProbability, offsets }: Omit<ExpertRows, keyof Disposable>): ExpertRows {
	return {
		rows,
		inE4m3,
		rowProbability,
		offsets,
		[Symbol.dispose]() {
			for (const owned of [rows, inE4m3, rowProbability]) owned?.[Symbol.dispose]();
		},
	};
}
