/**
 * The exchange of experts' rows planned by the host: counts are read back and told, every row's place is computed here, rows
 * and probabilities travel one after the other and are gathered by expert when they have come. The device's plan
 * is compared with it.
 */
import type { Device } from "../../src/native/device.ts";
import type { Group, RowRanges } from "../../src/parallel/group.ts";
import { axpby, Tensor } from "../../src/tensor/tensor.ts";

export interface HostPlaces {
	readonly expertTensor: number;
	readonly localExperts: number;
}

export interface HostPlan {
	/** Rows this rank sends to each member, in expert order. */
	readonly sent: RowRanges;
	/** Rows this rank receives from each member: source-major. */
	readonly received: RowRanges;
	/** Received row that stands at each row of (local expert, source) order. */
	readonly sourceOfRow: Int32Array;
	/** First row of every local expert. */
	readonly offsets: Int32Array;
}

/** `counts` [members][experts] of every member. */
export function planOnHost(counts: readonly Int32Array[], member: number, places: HostPlaces): HostPlan {
	const { expertTensor, localExperts } = places;
	const own = counts[member]!;
	const offsets = [0];
	for (const count of own) offsets.push(offsets.at(-1)! + count);
	const firstExpert = Math.floor(member / expertTensor) * localExperts;
	const members = counts.map((_, one) => one);
	const sent = {
		offsets: members.map((one) => offsets[Math.floor(one / expertTensor) * localExperts]!),
		counts: members.map((one) => {
			const first = Math.floor(one / expertTensor) * localExperts;
			return offsets[first + localExperts]! - offsets[first]!;
		}),
	};
	const countOf = (one: number, local: number) => counts[one]![firstExpert + local]!;
	const received = { offsets: [] as number[], counts: [] as number[] };
	let receivedRows = 0;
	for (const one of members) {
		received.offsets.push(receivedRows);
		let rows = 0;
		for (let local = 0; local < localExperts; local++) rows += countOf(one, local);
		received.counts.push(rows);
		receivedRows += rows;
	}
	// Received rows are source-major, then by expert; experts want theirs side by side, sources in order.
	const cursor = [...received.offsets];
	const sourceOfRow = new Int32Array(receivedRows);
	const localOffsets = new Int32Array(localExperts + 1);
	let row = 0;
	for (let local = 0; local < localExperts; local++) {
		for (const one of members) {
			for (let i = 0; i < countOf(one, local); i++) sourceOfRow[row++] = cursor[one]!++;
		}
		localOffsets[local + 1] = row;
	}
	return { sent, received, sourceOfRow, offsets: localOffsets };
}

export class HostExchange implements Disposable {
	readonly #sourceOfRow: Tensor;
	readonly #rowOfSource: Tensor;
	readonly offsets: Tensor;
	readonly sentRows: number;

	private constructor(
		readonly device: Device,
		readonly group: Group,
		readonly expertTensor: number,
		readonly plan: HostPlan,
	) {
		const rowOfSource = new Int32Array(plan.sourceOfRow.length);
		plan.sourceOfRow.forEach((source, at) => {
			rowOfSource[source] = at;
		});
		this.#sourceOfRow = Tensor.from(device, plan.sourceOfRow);
		this.#rowOfSource = Tensor.from(device, rowOfSource);
		this.offsets = Tensor.from(device, plan.offsets);
		const { offsets, counts } = plan.sent;
		this.sentRows = offsets.at(-1)! + counts.at(-1)!;
	}

	/** `offsets` i32 [experts + 1]: this rank's rows by expert. */
	static plan(group: Group, offsets: Tensor, places: HostPlaces): HostExchange {
		const own = offsets.toInt32();
		const counts = Int32Array.from({ length: own.length - 1 }, (_, e) => own[e + 1]! - own[e]!);
		const plan = planOnHost(group.exchange(counts), group.rank, places);
		return new HostExchange(offsets.device, group, places.expertTensor, plan);
	}

	get receivedRows(): number {
		return this.plan.sourceOfRow.length;
	}

	/** Rows_RW in global expert order to where their experts are, by local expert there. */
	dispatch(rows: Tensor): Tensor {
		const { device, plan, receivedRows } = this;
		using arrived = Tensor.empty(device, [receivedRows, rows.width], rows.dtype);
		this.group.allToAll(rows, plan.sent, arrived, plan.received).wait();
		const sorted = Tensor.empty(device, [receivedRows, rows.width], rows.dtype);
		gatherRows(arrived, this.#sourceOfRow, sorted);
		return sorted;
	}

	/** The way back; parts from several members of an expert add up. */
	combine(sorted: Tensor): Tensor {
		const { device, plan, sentRows, expertTensor } = this;
		using bySource = Tensor.empty(device, [this.receivedRows, sorted.width], sorted.dtype);
		gatherRows(sorted, this.#rowOfSource, bySource);
		using regions = Tensor.empty(device, [expertTensor * sentRows, sorted.width], sorted.dtype);
		const { offsets, counts } = plan.sent;
		const back = { offsets: offsets.map((offset, one) => (one % expertTensor) * sentRows + offset), counts };
		this.group.allToAll(bySource, plan.received, regions, back).wait();
		if (expertTensor === 1) return regions.share();
		const sum = Tensor.empty(device, [sentRows, sorted.width], sorted.dtype);
		for (let part = 0; part < expertTensor; part++) {
			using region = regions.rowsFrom(part * sentRows, sentRows);
			axpby(region, sum, 1, part === 0 ? 0 : 1);
		}
		return sum;
	}

	[Symbol.dispose](): void {
		for (const tensor of [this.#sourceOfRow, this.#rowOfSource, this.offsets]) tensor[Symbol.dispose]();
	}
}

/** to[r] = from[index[r]]. */
function gatherRows(from: Tensor, index: Tensor, to: Tensor): void {
	from.device.run("moe_permute", {
		x: from,
		probabilities: null,
		slot_of_row: index,
		row_count: null,
		rows: to,
		row_probability: null,
		e4m3: null,
		e4m3_factors: null,
		tokens: to.rows,
		topk: 1,
		width: to.width,
		dtype: from.dtypeCode,
	});
}
