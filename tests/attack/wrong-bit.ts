/** Turns a bit of what a running rank keeps of its training, in the memory of its process, as a faulty device would. Needs root. */
import { closeSync, openSync, readdirSync, readFileSync, readlinkSync, readSync, statSync, writeSync } from "node:fs";
import { KeptFile, slots } from "../../src/train/restart/kept-file.ts";

/** Bytes by which a place is found again. */
const needleBytes = 64;
const pageBytes = 4096;

/** Whether this machine lets a test write to another process's memory, and ranks keep their state there and not on a GPU. */
export function canTurnBits(): boolean {
	if (process.env.MIMO_TEST_DEVICE === "cuda") return false;
	const child = Bun.spawn(["sleep", "10"]);
	try {
		closeSync(openSync(`/proc/${child.pid}/mem`, "r+"));
		return true;
	} catch {
		return false;
	} finally {
		child.kill();
	}
}

/**
 * Stops the process, finds a piece of its copy of `step` (kept-state.ts) in its memory, turns a bit there and lets the process go on.
 * Returns false where there is none at this moment: that step has no copy yet, a later one has, or an update has begun.
 */
export function turnBit(pid: number, step: number, random: () => number): boolean {
	try {
		process.kill(pid, "SIGSTOP");
		const file = keptFile(pid);
		return file !== null && turnBitOf(pid, file, step, random);
	} catch {
		// The process has ended.
		return false;
	} finally {
		try {
			process.kill(pid, "SIGCONT");
		} catch {
			// The same.
		}
	}
}

/**
 * The file of the process's own state. Of the files without a name in the host's memory that it has open, others are the run's shared
 * memory, and another rank's state, which it receives and maps nowhere. null: it has no rank at the moment.
 */
export function keptFile(pid: number): string | null {
	try {
		return findKeptFile(pid);
	} catch {
		// The process, or a descriptor of it, has gone meanwhile.
		return null;
	}
}

function findKeptFile(pid: number): string | null {
	const maps = readFileSync(`/proc/${pid}/maps`, "utf8");
	const open = readdirSync(`/proc/${pid}/fd`)
		.map((name) => `/proc/${pid}/fd/${name}`)
		.filter((path) => /^\/dev\/shm\/#\d+ \(deleted\)$/.test(readlinkSync(path)));
	return open.find((path) => maps.includes(readlinkSync(path)) && isKeptFile(path)) ?? null;
}

function wordsOf(path: string): Int32Array {
	const words = new Int32Array(9);
	const file = openSync(path, "r");
	readSync(file, words, 0, words.byteLength, 0);
	closeSync(file);
	return words;
}

/** Whether a file has the words and the size of one that holds steps of the run's first layout (kept-file.ts). */
function isKeptFile(path: string): boolean {
	const words = wordsOf(path);
	const [step, room, pages, layout] = [0, 5, 6, 7].map((index) => words[index]!) as [number, number, number, number];
	// The run's shared memory begins with a name, which is a large number.
	return step < 2 ** 24 && room === 1 && layout === 1 && pages > 0 && statSync(path).size >= 2 * pages * pageBytes;
}

function turnBitOf(pid: number, path: string, step: number, random: () => number): boolean {
	using file = new KeptFile(path, { layout: 0, rank: wordsOf(path)[8]! - 1 });
	if (Math.max(...slots.map((slot) => file.step(slot))) !== step) return false;
	const bytes = new Uint8Array(file.pages * pageBytes);
	file.read(bytes, file.offsetOf(file.slotOf(step)!));
	const places = bytes.length / needleBytes;
	for (let attempt = 0; attempt < 20; attempt++) {
		const at = Math.floor(places * random()) * needleBytes;
		const needle = bytes.subarray(at, at + needleBytes);
		if (new Set(needle).size < needleBytes / 2) continue;
		const found = search(pid, needle);
		const bit = Math.floor(8 * needleBytes * random());
		for (const address of found) turn(pid, address + Math.floor(bit / 8), 1 << (bit % 8));
		return found.length > 0;
	}
	return false;
}

/** Mappings of this size and more hold JavaScript's heap and the buffers through which copies go to another host. */
const largeMapping = 2 ** 24;

/** Addresses of bytes in the process's own memory, where a small model keeps its state. */
function search(pid: number, needle: Uint8Array): number[] {
	const memory = openSync(`/proc/${pid}/mem`, "r");
	const pages = openSync(`/proc/${pid}/pagemap`, "r");
	const found: number[] = [];
	for (const line of readFileSync(`/proc/${pid}/maps`, "utf8").split("\n")) {
		const [, begin, end] = /^(\w+)-(\w+) rw-p \S+ \S+ 0\s*(?:\[heap\])?$/.exec(line) ?? [];
		if (end === undefined) continue;
		const [from, to] = [Number.parseInt(begin!, 16), Number.parseInt(end, 16)];
		if (to - from >= largeMapping) continue;
		for (const [first, last] of presentPages(pages, from, to)) {
			const bytes = Buffer.alloc(last - first);
			const there = bytes.subarray(0, readSync(memory, bytes, 0, bytes.length, first));
			for (let at = there.indexOf(needle); at >= 0; at = there.indexOf(needle, at + 1)) found.push(first + at);
		}
	}
	closeSync(pages);
	closeSync(memory);
	return found;
}

/** Runs of pages that are in memory. */
function* presentPages(pagemap: number, begin: number, end: number): Generator<readonly [first: number, last: number]> {
	const entries = new BigUint64Array((end - begin) / pageBytes);
	const read = readSync(pagemap, new Uint8Array(entries.buffer), 0, entries.byteLength, (begin / pageBytes) * 8) / 8;
	for (let at = 0; at < read; at++) {
		const first = at;
		while (at < read && entries[at]! >> 63n === 1n) at++;
		if (at > first) yield [begin + first * pageBytes, begin + at * pageBytes];
	}
}

function turn(pid: number, address: number, bit: number): void {
	const memory = openSync(`/proc/${pid}/mem`, "r+");
	const byte = new Uint8Array(1);
	readSync(memory, byte, 0, 1, address);
	byte[0]! ^= bit;
	writeSync(memory, byte, 0, 1, address);
	closeSync(memory);
}
