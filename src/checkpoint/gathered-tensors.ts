/**
 * A model's tensors as a checkpoint store on several ranks. Each rank writes some tensors whole and asks for a few of them at a time: it
 * takes the part that it holds itself, and the other ranks send theirs, in the stored type.
 */
import type { LogicalTensor } from "../models/module-parameters.ts";
import type { Device } from "../native/device.ts";
import { consecutive, exchangeTexts, type Group, type ShardBlock } from "../parallel/index.ts";
import { elementCount, type FloatDtype, Tensor } from "../tensor/index.ts";
import { copyBlocks, fullWidth, type NamedTensors } from "./model-store.ts";
import { bytesOfType, sourcesOf, type TensorStore, type TensorType } from "./store.ts";

type Values = Float32Array | Uint16Array;

/** A member's part of a tensor: local elements, in rows of `width`, and their rectangles of the whole. */
interface Part {
	readonly member: number;
	readonly dtype: FloatDtype;
	readonly elements: number;
	readonly width: number;
	readonly blocks: readonly ShardBlock[];
}

/** A part that a member sends to another. */
interface Transfer {
	readonly name: string;
	readonly part: Part;
	readonly to: number;
}

/** Elements that a member sends and receives at once. */
const largestBatch = 2 ** 26;

/** Bytes of whole tensors that a rank holds at once, beside the last of them. */
const roundBytes = 2 ** 28;

const newValues = (dtype: FloatDtype, elements: number): Values =>
	dtype === "f32" ? new Float32Array(elements) : new Uint16Array(elements);

export class GatheredTensors implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;
	readonly #own: ReadonlyMap<string, LogicalTensor>;
	readonly #parts = new Map<string, Part[]>();
	readonly #values = new Map<string, Values>();

	/** Every rank of `group` calls this together. */
	constructor(
		readonly path: string,
		module: NamedTensors,
		readonly group: Group,
		private readonly device: Device,
	) {
		this.#own = new Map([...module.logicalTensors()].map((tensor) => [tensor.name, tensor]));
		const own = [...this.#own.values()].map(({ name, shape, value, blocks }) => {
			return { name, shape, dtype: value.dtype as FloatDtype, elements: value.elements, width: value.width, blocks };
		});
		const tensors = new Map<string, TensorType>();
		for (const [member, text] of exchangeTexts(group, JSON.stringify(own)).entries()) {
			for (const { name, shape, ...part } of JSON.parse(text) as typeof own) {
				tensors.set(name, { dtype: part.dtype === "f32" ? "F32" : "BF16", shape });
				this.#parts.set(name, [...(this.#parts.get(name) ?? []), { ...part, member }]);
			}
		}
		this.tensors = tensors;
	}

	/** Elements of a tensor that a member holds. */
	heldBy(member: number, name: string): number {
		const part = this.#parts.get(name)!.find((one) => one.member === member);
		return part === undefined ? 0 : coveredBy(part);
	}

	/** Brings whole tensors to the members that want them, by member; those of before are gone. Every rank calls this together. */
	fetch(wanted: readonly (readonly string[])[]): void {
		const { rank } = this.group;
		this.#values.clear();
		const all = wanted.flatMap((names, to) =>
			names.flatMap((name) => this.#partsFor(name, to).map((part): Transfer => ({ name, part, to }))),
		);
		for (const { name, part, to } of all) {
			if (to !== rank || part.member !== rank) continue;
			const local = newValues(part.dtype, part.elements);
			this.device.copyToHost(local, this.#own.get(name)!.value);
			this.#place(name, part, local);
		}
		for (const dtype of ["f32", "bf16"] as const) {
			this.#transfer(
				all.filter(({ part, to }) => part.member !== to && part.dtype === dtype),
				dtype,
			);
		}
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const values = this.#values.get(name);
		if (values === undefined) throw new RangeError(`${name} was not brought to this rank.`);
		into.set(new Uint8Array(values.buffer, values.byteOffset + offset, into.byteLength));
	}

	/** Parts that make up a tensor, the member's own before those of members behind it. */
	#partsFor(name: string, to: number): Part[] {
		const { size } = this.group;
		const found = new Map<string, Part>();
		const near = (part: Part) => (part.member - to + size) % size;
		for (const part of this.#parts.get(name)!.toSorted((one, other) => near(one) - near(other))) {
			const key = JSON.stringify(part.blocks);
			if (!found.has(key)) found.set(key, part);
		}
		const covered = [...found.values()].reduce((sum, part) => sum + coveredBy(part), 0);
		if (covered === elementCount(this.tensors.get(name)!.shape)) return [...found.values()];
		throw new RangeError(`The ranks hold ${covered} elements of ${name} of shape [${this.tensors.get(name)!.shape}].`);
	}

	#transfer(transfers: readonly Transfer[], dtype: FloatDtype): void {
		const { size } = this.group;
		const arriving = new Map<Transfer, Values>();
		let batch: Piece[] = [];
		let [sent, received] = [new Float64Array(size), new Float64Array(size)];
		const flush = () => {
			this.#exchange(batch, dtype, arriving);
			batch = [];
			[sent, received] = [new Float64Array(size), new Float64Array(size)];
		};
		for (const transfer of transfers) {
			const { part, to } = transfer;
			for (let begin = 0; begin < part.elements; begin += largestBatch) {
				const elements = Math.min(largestBatch, part.elements - begin);
				if (Math.max(sent[part.member]!, received[to]!) + elements > largestBatch) flush();
				batch.push({ transfer, begin, elements });
				sent[part.member]! += elements;
				received[to]! += elements;
			}
		}
		if (batch.length > 0) flush();
	}

	#exchange(batch: readonly Piece[], dtype: FloatDtype, arriving: Map<Transfer, Values>): void {
		const { device, group } = this;
		const { rank, size } = group;
		const outgoing = batch.filter(({ transfer }) => transfer.part.member === rank);
		const incoming = batch.filter(({ transfer }) => transfer.to === rank);
		const [sentTo, comingFrom] = [new Array<number>(size).fill(0), new Array<number>(size).fill(0)];
		for (const { transfer, elements } of outgoing) sentTo[transfer.to]! += elements;
		for (const { transfer, elements } of incoming) comingFrom[transfer.part.member]! += elements;
		const [sendRows, receiveRows] = [consecutive(sentTo), consecutive(comingFrom)];
		const room = (counts: readonly number[]) =>
			Tensor.empty(device, [counts.reduce((sum, count) => sum + count, 0), 1], dtype, "workspace");
		using send = room(sentTo);
		using receive = room(comingFrom);
		const at = [...sendRows.offsets];
		for (const { transfer, begin, elements } of outgoing) {
			using flat = this.#own.get(transfer.name)!.value.view([1, transfer.part.elements]);
			using from = flat.columns(begin, elements);
			using to = send.rowsFrom(at[transfer.to]!, elements);
			device.copy(to, from, from.bytes);
			at[transfer.to]! += elements;
		}
		group.allToAll(send, sendRows, receive, receiveRows).wait();
		const host = newValues(dtype, receive.elements);
		device.copyToHost(host, receive);
		const place = [...receiveRows.offsets];
		for (const { transfer, begin, elements } of incoming) {
			const { name, part } = transfer;
			const local = arriving.get(transfer) ?? newValues(dtype, part.elements);
			arriving.set(transfer, local);
			local.set(host.subarray(place[part.member]!, place[part.member]! + elements), begin);
			place[part.member]! += elements;
			if (begin + elements < part.elements) continue;
			this.#place(name, part, local);
			arriving.delete(transfer);
		}
	}

	/** Puts a part where it belongs in the whole tensor. */
	#place(name: string, { dtype, width, blocks }: Part, local: Values): void {
		const { shape } = this.tensors.get(name)!;
		const elements = elementCount(shape);
		const [block] = blocks;
		if (blocks.length === 1 && block!.rows * block!.columns === elements && local.length === elements) {
			this.#values.set(name, local);
			return;
		}
		const full = this.#values.get(name) ?? newValues(dtype, elements);
		this.#values.set(name, full);
		copyBlocks(local as Float32Array, width, full as Float32Array, fullWidth(shape), blocks, "to full");
	}

	[Symbol.dispose](): void {
		this.#values.clear();
		for (const { value, gradient } of this.#own.values()) {
			value[Symbol.dispose]();
			gradient?.[Symbol.dispose]();
		}
	}
}

/** Elements of a transfer that go in one exchange. */
interface Piece {
	readonly transfer: Transfer;
	readonly begin: number;
	readonly elements: number;
}

const coveredBy = ({ blocks }: Part) => blocks.reduce((sum, { rows, columns }) => sum + rows * columns, 0);

/**
 * The tensors of `store`, which are made of gathered ones, in the rounds in which this rank reads them: every tensor is a rank's that
 * holds the most of it, and ranks have as many bytes as can be. Every rank iterates to the end, together.
 */
export function* shareOf(store: TensorStore, gathered: GatheredTensors): Generator<readonly string[]> {
	const { rank, size } = gathered.group;
	const queues = Array.from({ length: size }, () => [] as { name: string; sources: readonly string[] }[]);
	const load = new Float64Array(size);
	const members = [...load.keys()];
	const memberOf = new Map<string, number>();
	for (const [name, type] of store.tensors) {
		const sources = sourcesOf(store, name).flatMap((source) => (source.store === gathered ? [source.name] : []));
		const held = members.map((member) => sources.reduce((sum, source) => sum + gathered.heldBy(member, source), 0));
		const most = Math.max(...held);
		const best = members.filter((member) => held[member] === most).reduce((a, b) => (load[b]! < load[a]! ? b : a));
		// Tensors of one source, such as the projections of one matrix, go together.
		const member = sources.map((source) => memberOf.get(source)).find((found) => found !== undefined) ?? best;
		for (const source of sources) memberOf.set(source, member);
		load[member]! += bytesOfType(type);
		queues[member]!.push({ name, sources });
	}
	for (const next = new Array<number>(size).fill(0); next.some((at, member) => at < queues[member]!.length); ) {
		const rounds = queues.map((queue, member) => {
			const wanted = new Set<string>();
			const begin = next[member]!;
			for (let bytes = 0; bytes < roundBytes && next[member]! < queue.length; next[member]!++) {
				for (const source of queue[next[member]!]!.sources) {
					if (!wanted.has(source)) bytes += bytesOfType(gathered.tensors.get(source)!);
					wanted.add(source);
				}
			}
			return { wanted: [...wanted], names: queue.slice(begin, next[member]).map(({ name }) => name) };
		});
		gathered.fetch(rounds.map(({ wanted }) => wanted));
		yield rounds[rank]!.names;
	}
}
