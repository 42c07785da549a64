/**
 * The all-to-all token dispatcher's exchange between ranks with different experts (docs/spec/language-model.md §4.5). The
 * dispatch group is expt_tp × ep, expt_tp fastest: expert e is on the `expertTensor` members of expert-parallel rank e / (E /
 * EP), each with a shard of its channels. A token's row is sent to all of them, and their partial outputs are summed on the way
 * back. The device computes from every member's counts which rows go where; the host waits for them only if the row transport
 * needs counts.
 */
import { type ExpertOrder, type Tape, Tensor } from "../../tensor/index.ts";
import type { DeviceRanges, Group, RowsOfMember } from "../group.ts";
import { type ExchangeMembers, rowCapacity, tokensOfAnyMember } from "./members.ts";
import { parts, recordExchange, type StartedExchange, type Transfer, transferOf } from "./recorded-exchange.ts";

/** The plan of one dispatch: source and destination of each row, used for rows and probabilities in both directions. */
export class Exchange implements Disposable {
	/** i32 [1], the last of `offsets`: number of rows for this rank's experts. */
	readonly rowCount: Tensor;
	/** i32 [1]: number of rows that this rank sends. */
	readonly sentCount: Tensor;

	private constructor(
		readonly parallel: ExchangeMembers,
		/** Upper bound of this rank's rows, live ones first. */
		readonly slots: number,
		/** Rows reserved for each member, equal at all members: as many as any member sends. */
		readonly regionRows: number,
		/** Rows reserved for this rank's experts. */
		readonly capacity: number,
		/** Ranges of rows to the experts (`out`) and from them (`in`). */
		readonly out: DeviceRanges,
		readonly back: DeviceRanges,
		/** i32 [localExperts + 1]: first row of each local expert. */
		readonly offsets: Tensor,
		order: ExpertOrder,
	) {
		this.rowCount = offsets.columns(parallel.localExperts, 1);
		this.sentCount = order.rowCount.share();
	}

	/**
	 * Exchanges the members' counts and plans the exchange. `overflow`, i32 [2], is written if more rows are sent to this rank
	 * than fit; the last rows are dropped then.
	 */
	static plan(tape: Tape, order: ExpertOrder, parallel: ExchangeMembers, overflow: Tensor | null): Exchange {
		const { group, expertTensor, localExperts } = parallel;
		const { device } = tape;
		const tokens = tokensOfAnyMember(tape, order, parallel);
		const places = { members: group.size, expertTensor, localExperts };
		const capacity = rowCapacity(tokens, order.topk, places, parallel.capacity.bound);
		const regionRows = tokens * order.topk;
		using everyOffsets = Tensor.empty(device, [group.size, order.offsets.elements], "i32");
		group.allGather(order.offsets, everyOffsets).wait();
		const ranges = () => {
			const table = () => Tensor.empty(device, [group.size, localExperts, 3], "i32");
			return { out: table(), in: table() };
		};
		const [out, back] = [ranges(), ranges()];
		const offsets = Tensor.empty(device, [localExperts + 1], "i32");
		device.run("expert_exchange_plan", {
			offsets: everyOffsets,
			out_send: out.out,
			out_receive: out.in,
			back_send: back.out,
			back_receive: back.in,
			local_offsets: offsets,
			overflow,
			members: group.size,
			member: group.rank,
			expert_tensor: expertTensor,
			local_experts: localExperts,
			capacity,
			region_rows: regionRows,
		});
		const known = (way: ReturnType<typeof ranges>) => ({ ...way, onHost: onHost(way, group) });
		return new Exchange(parallel, order.slots, regionRows, capacity, known(out), known(back), offsets, order);
	}

	/** The tensors that a backward closure reads. */
	get tensors(): readonly Tensor[] {
		const { out, back, offsets, rowCount, sentCount } = this;
		return [out.out, out.in, back.out, back.in, offsets, rowCount, sentCount];
	}

	[Symbol.dispose](): void {
		for (const tensor of this.tensors) tensor[Symbol.dispose]();
	}
}

/** The ranges on the host, if the row transport needs them there; waits for the device. */
function onHost({ out, in: coming }: Pick<DeviceRanges, "out" | "in">, group: Group): Int32Array | null {
	return group.rowTransport() === "counts" ? Int32Array.from([...out.toInt32(), ...coming.toInt32()]) : null;
}

/**
 * Starts sending rows_RW, in global expert order, and the values sent along, to their experts; they arrive sorted by (local
 * expert, source, row).
 */
export function startDispatch(tape: Tape, sent: RowsOfMember, exchange: Exchange): StartedExchange {
	return recordExchange(tape, "dispatch", exchange.tensors, sent, {
		out: () => toExperts(sent, exchange),
		back: (gradients) => {
			const [rows, beside] = parts(sent).map(({ gradient }) => gradient!.contiguousTarget());
			return fromExperts(gradients, { rows: rows!, beside: beside ?? null }, exchange);
		},
	});
}

/** Starts sending the outputs of this rank's experts back; they arrive in global expert order of this rank's tokens. */
export function startCombine(tape: Tape, outputs: Tensor, exchange: Exchange): StartedExchange {
	const sent = { rows: outputs, beside: null };
	return recordExchange(tape, "combine", exchange.tensors, sent, {
		out: () => {
			using all = Tensor.empty(tape.device, [exchange.slots, outputs.width], outputs.dtype);
			return fromExperts(sent, { rows: all.withRowCount(exchange.sentCount), beside: null }, exchange);
		},
		back: (gradients) => toExperts(gradients, exchange),
	});
}

/** Sends rows in expert order to their experts' ranks; arriving rows are sorted by local expert. */
function toExperts(sent: RowsOfMember, exchange: Exchange): Transfer {
	const { capacity, regionRows, rowCount, out } = exchange;
	const room = (like: Tensor) => Tensor.empty(like.device, [capacity, widthOf(like)], like.dtype);
	const come = { rows: room(sent.rows), beside: sent.beside && room(sent.beside) };
	const leaving = matrices(sent);
	const stage = { at: "sender", rows: regionRows } as const;
	const pending = exchange.parallel.group.exchangeRows(leaving, come, out, stage);
	return transferOf([pending], [...parts(leaving), ...parts(come)], () => ({
		rows: live(come.rows, sent.rows, rowCount),
		beside: come.beside && live(come.beside, sent.beside!, rowCount),
	}));
}

/** A view of the live rows with as many dimensions as `like`. */
function live(matrix: Tensor, like: Tensor, rowCount: Tensor): Tensor {
	using shaped = matrix.view(like.shape.length > 1 ? matrix.shape : [matrix.rows]);
	return shaped.withRowCount(rowCount);
}

/**
 * Sends rows, sorted by local expert, back to their tokens' ranks into `target` (taken over); parts from several members of one
 * expert are summed.
 */
function fromExperts(sorted: RowsOfMember, target: RowsOfMember, exchange: Exchange): Transfer {
	const { back, regionRows } = exchange;
	const { group, expertTensor } = exchange.parallel;
	const leaving = matrices(sorted);
	const whole = matrices(target);
	// A region for each member of an expert's tensor-parallel group; a single region is the result itself.
	const regions = (like: Tensor) =>
		expertTensor === 1 ? like.share() : Tensor.empty(like.device, [expertTensor * regionRows, like.width], like.dtype);
	const come = { rows: regions(whole.rows), beside: whole.beside && regions(whole.beside) };
	const stage = { at: "receiver", rows: expertTensor * regionRows } as const;
	const pending = group.exchangeRows(leaving, come, back, stage);
	const ends = [leaving, come, whole, target].flatMap(parts);
	return transferOf([pending], ends, () => {
		if (expertTensor > 1) {
			for (const [index, sum] of parts(whole).entries()) addRegions(parts(come)[index]!, sum, exchange);
		}
		return { rows: target.rows.share(), beside: target.beside?.share() ?? null };
	});
}

/** sum = Σ of the regions, in member order, in the storage dtype. */
function addRegions(regions: Tensor, sum: Tensor, { parallel, regionRows, sentCount }: Exchange): void {
	for (let part = 0; part < parallel.expertTensor; part++) {
		using region = regions.rowsFrom(part * regionRows, sum.rows);
		sum.device.run("axpby", {
			x: region,
			y: sum,
			row_count: sentCount,
			rows: sum.rows,
			width: sum.width,
			x_stride: region.stride,
			y_stride: sum.stride,
			alpha: 1,
			beta: part === 0 ? 0 : 1,
			x_dtype: region.dtypeCode,
			y_dtype: sum.dtypeCode,
		});
	}
}

/** Views vectors as matrices of one column. */
function matrices({ rows, beside }: RowsOfMember): RowsOfMember {
	const matrix = (x: Tensor) => x.view([x.elements / widthOf(x), widthOf(x)]);
	return { rows: matrix(rows), beside: beside && matrix(beside) };
}

function widthOf(x: Tensor): number {
	return x.shape.length > 1 ? x.width : 1;
}
