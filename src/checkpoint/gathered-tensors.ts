/**
 * A model's tensors as a checkpoint store on several ranks. Each rank writes some tensors whole and asks for a few of them at a time: it
 * reads whole rows that it holds itself from its device, and the other ranks send their parts, in the stored type, into memory that is
 * kept from one time to the next.
 */
import type { LogicalTensor } from "../models/module-parameters.ts";
import type { Device } from "../native/device.ts";
import { consecutive, exchangeTexts, type Group, type ShardBlock } from "../parallel/index.ts";
import { dtypeBytes, elementCount, type FloatDtype, Tensor } from "../tensor/index.ts";
import { fullWidth, type NamedTensors } from "./model-store.ts";
import { bytesOfType, sourcesOf, type TensorStore, type TensorType } from "./store.ts";

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
const largestBatch = 2 ** 23;

/** Bytes of whole tensors that a rank holds at once, beside the last of them. */
const roundBytes = 2 ** 26;

/** Bytes of a tensor that lie in memory as rows of `width` bytes, and the rectangle of the whole that they are. */
interface Held {
	readonly block: ShardBlock;
	readonly width: number;
	readonly read: (position: number, into: Uint8Array) => void;
}

export class GatheredTensors implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;
	readonly #own: ReadonlyMap<string, LogicalTensor>;
	readonly #parts = new Map<string, Part[]>();
	readonly #held = new Map<string, Held[]>();
	readonly #room = new HostRoom();

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
		this.#held.clear();
		this.#room.empty();
		const transfers = wanted.map((names, to) =>
			names.flatMap((name) => this.#partsFor(name, to).map((part): Transfer => ({ name, part, to }))),
		);
		for (const { name, part } of transfers[rank]!) if (part.member === rank) this.#holdOwn(name, part);
		for (const dtype of ["f32", "bf16"] as const) {
			const coming = transfers.map((all) => all.filter(({ part, to }) => part.member !== to && part.dtype === dtype));
			for (const batch of batchesOf(coming)) this.#exchange(batch, dtype);
		}
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const held = this.#held.get(name);
		if (held === undefined) throw new RangeError(`${name} was not brought to this rank.`);
		const { dtype, shape } = this.tensors.get(name)!;
		const bytes = dtypeBytes[dtype === "F32" ? "f32" : "bf16"];
		for (const part of held) readHeld(part, fullWidth(shape) * bytes, bytes, offset, into);
	}

	/** A part of this rank: where it is whole rows of the tensor it stays on the device, and is read from there. */
	#holdOwn(name: string, part: Part): void {
		const { value } = this.#own.get(name)!;
		const { device } = this;
		const rows = part.width === fullWidth(this.tensors.get(name)!.shape);
		if (rows) {
			this.#hold(name, part, 0, (position, into) =>
				device.copyToHost(into, { allocation: value.allocation, byteOffset: value.byteOffset + position }),
			);
			return;
		}
		const local = this.#room.take(value.bytes);
		device.copyToHost(local, value);
		this.#hold(name, part, 0, bytesFrom(local));
	}

	/** Keeps rows of a part, from `begin` on as many as `read` has: those of a batch, or (null) all. */
	#hold(
		name: string,
		{ width, blocks, dtype }: Part,
		begin: number,
		read: Held["read"],
		rows: number | null = null,
	): void {
		const held = this.#held.get(name) ?? [];
		this.#held.set(name, held);
		for (const block of blocks) {
			const skip = Math.max(0, begin - block.localRow);
			const localRow = block.localRow + skip - begin;
			const count = Math.min(block.rows - skip, (rows ?? Number.POSITIVE_INFINITY) - localRow);
			if (count <= 0) continue;
			held.push({
				block: { ...block, localRow, fullRow: block.fullRow + skip, rows: count },
				...{ width: width * dtypeBytes[dtype], read },
			});
		}
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

	#exchange(batch: readonly Piece[], dtype: FloatDtype): void {
		const { device, group } = this;
		const { rank, size } = group;
		const outgoing = batch.filter(({ transfer }) => transfer.part.member === rank);
		const incoming = batch.filter(({ transfer }) => transfer.to === rank);
		const [sentTo, comingFrom] = [new Array<number>(size).fill(0), new Array<number>(size).fill(0)];
		for (const piece of outgoing) sentTo[piece.transfer.to]! += elementsOf(piece);
		for (const piece of incoming) comingFrom[piece.transfer.part.member]! += elementsOf(piece);
		const [sendRows, receiveRows] = [consecutive(sentTo), consecutive(comingFrom)];
		const room = (counts: readonly number[]) =>
			Tensor.empty(device, [counts.reduce((sum, count) => sum + count, 0), 1], dtype, "workspace");
		using send = room(sentTo);
		using receive = room(comingFrom);
		const at = [...sendRows.offsets];
		for (const piece of outgoing) {
			const { transfer, begin, rows } = piece;
			using from = this.#own.get(transfer.name)!.value.rowsFrom(begin, rows);
			using to = send.rowsFrom(at[transfer.to]!, elementsOf(piece));
			device.copy(to, from, from.bytes);
			at[transfer.to]! += elementsOf(piece);
		}
		group.allToAll(send, sendRows, receive, receiveRows).wait();
		const host = this.#room.take(receive.bytes);
		device.copyToHost(host, receive);
		const place = [...receiveRows.offsets];
		for (const piece of incoming) {
			const { name, part } = piece.transfer;
			const local = host.subarray(place[part.member]! * dtypeBytes[dtype]);
			this.#hold(name, part, piece.begin, bytesFrom(local), piece.rows);
			place[part.member]! += elementsOf(piece);
		}
	}

	[Symbol.dispose](): void {
		this.#held.clear();
		for (const { value, gradient } of this.#own.values()) {
			value[Symbol.dispose]();
			gradient?.[Symbol.dispose]();
		}
	}
}

/** Rows of a transfer that go in one exchange. */
interface Piece {
	readonly transfer: Transfer;
	readonly begin: number;
	readonly rows: number;
}

const elementsOf = ({ transfer, rows }: Piece) => rows * transfer.part.width;

/** Transfers to each member as exchanges in which no member sends or receives more than `largestBatch` elements, if a row has no more. */
function* batchesOf(transfers: readonly (readonly Transfer[])[]): Generator<readonly Piece[]> {
	const size = transfers.length;
	const queues = transfers.map((all) =>
		all.flatMap((transfer) => {
			const { width, elements } = transfer.part;
			const most = Math.max(1, Math.floor(largestBatch / width));
			return Array.from({ length: Math.ceil(elements / width / most) }, (_, i): Piece => {
				return { transfer, begin: i * most, rows: Math.min(most, elements / width - i * most) };
			});
		}),
	);
	for (const next = queues.map(() => 0); ; ) {
		const batch: Piece[] = [];
		const sent = new Array<number>(size).fill(0);
		for (const [to, queue] of queues.entries()) {
			for (let received = 0; next[to]! < queue.length; next[to]!++) {
				const piece = queue[next[to]!]!;
				const from = piece.transfer.part.member;
				const most = Math.max(received, sent[from]!);
				if (most > 0 && most + elementsOf(piece) > largestBatch) break;
				batch.push(piece);
				received += elementsOf(piece);
				sent[from]! += elementsOf(piece);
			}
		}
		if (batch.length === 0) return;
		yield batch;
	}
}

/** Memory of the host that is taken piece by piece, and all at once given back to be taken again: new pages cost more than the copies into them. */
class HostRoom {
	readonly #buffers: Uint8Array[] = [];
	#buffer = 0;
	#used = 0;

	/** `bytes` bytes with any contents, at a multiple of 8. */
	take(bytes: number): Uint8Array {
		while (this.#buffer < this.#buffers.length && this.#buffers[this.#buffer]!.length < this.#used + bytes) {
			this.#buffer++;
			this.#used = 0;
		}
		if (this.#buffer === this.#buffers.length) this.#buffers.push(new Uint8Array(Math.max(bytes, 4 * largestBatch)));
		const taken = this.#buffers[this.#buffer]!.subarray(this.#used, this.#used + bytes);
		this.#used += Math.ceil(bytes / 8) * 8;
		return taken;
	}

	empty(): void {
		this.#buffer = 0;
		this.#used = 0;
	}
}

const bytesFrom = (local: Uint8Array) => (position: number, into: Uint8Array) =>
	into.set(local.subarray(position, position + into.byteLength));

/** Fills the part of `into`, bytes from `offset` on of a tensor with rows of `fullBytes`, that `held` has; elements have `bytes` bytes. */
function readHeld(
	{ block, width, read }: Held,
	fullBytes: number,
	bytes: number,
	offset: number,
	into: Uint8Array,
): void {
	const columns = block.columns * bytes;
	// Whole rows are one run.
	const together = columns === width && columns === fullBytes;
	const [runs, length] = together ? [1, block.rows * columns] : [block.rows, columns];
	const begin = block.fullRow * fullBytes + block.fullColumn * bytes;
	const local = block.localRow * width + block.localColumn * bytes;
	const first = Math.max(0, Math.floor((offset - begin - length) / fullBytes) + 1);
	for (let run = together ? 0 : first; run < runs; run++) {
		const at = begin + run * fullBytes;
		const from = Math.max(offset, at);
		const to = Math.min(offset + into.byteLength, at + length);
		if (at >= offset + into.byteLength) return;
		if (to > from) read(local + run * width + from - at, into.subarray(from - offset, to - offset));
	}
}

const coveredBy = ({ blocks }: Part) => blocks.reduce((sum, { rows, columns }) => sum + rows * columns, 0);

/**
 * The tensors of `store`, which are made of gathered ones, in the rounds in which this rank reads them: every tensor is a rank's that
 * holds the most of it, and ranks have as many bytes as can be; with `alone` all are the first rank's. Every rank iterates to the end,
 * together.
 */
export function* shareOf(store: TensorStore, gathered: GatheredTensors, alone = false): Generator<readonly string[]> {
	const { rank, size } = gathered.group;
	const queues = Array.from({ length: size }, () => [] as { name: string; sources: readonly string[] }[]);
	const load = new Float64Array(size);
	const members = [...load.keys()];
	const memberOf = new Map<string, number>();
	for (const [name, type] of store.tensors) {
		const sources = sourcesOf(store, name).flatMap((source) => (source.store === gathered ? [source.name] : []));
		const held = members.map((member) => sources.reduce((sum, source) => sum + gathered.heldBy(member, source), 0));
		const most = Math.max(...held);
		const fullest = members.filter((member) => held[member] === most);
		const best = alone ? 0 : fullest.reduce((a, b) => (load[b]! < load[a]! ? b : a));
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
