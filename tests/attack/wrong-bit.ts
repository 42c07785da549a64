/** Turns a bit of what a running rank keeps of its training, in the memory of its process, as a faulty device would. Needs root. */
import { closeSync, openSync, readdirSync, readFileSync, readlinkSync, readSync, writeSync } from "node:fs";
import { KeptFile, slots } from "../../src/train/restart/kept-file.ts";

/** Bytes by which a place is found again. */
const needleBytes = 64;
const pageBytes = 4096;

/** Whether this machine lets a test write to another process's memory. */
export function canTurnBits(): boolean {
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
 * Stops the process, finds a piece of its newest copy (kept-state.ts) in its memory, turns a bit there and lets the process go on. Returns
 * false where there is none at this moment: no copy, an update, or a step that is saved, whose checkpoint would be another.
 */
export function turnBit(pid: number, random: () => number, saveInterval: number): boolean {
	try {
		process.kill(pid, "SIGSTOP");
		return keptFiles(pid).some((path) => turnBitOf(pid, path, random, saveInterval));
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

/** Files without a name in the host's memory that the process has open. */
function keptFiles(pid: number): string[] {
	return readdirSync(`/proc/${pid}/fd`)
		.map((name) => `/proc/${pid}/fd/${name}`)
		.filter((path) => /^\/dev\/shm\/#\d+ \(deleted\)$/.test(readlinkSync(path)));
}

function turnBitOf(pid: number, path: string, random: () => number, saveInterval: number): boolean {
	using file = new KeptFile(path, 0);
	const step = Math.max(...slots.map((slot) => file.step(slot)));
	if (step === 0 || step % saveInterval === 0) return false;
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

/** Addresses of bytes in the process's own memory. */
function search(pid: number, needle: Uint8Array): number[] {
	const memory = openSync(`/proc/${pid}/mem`, "r");
	const pages = openSync(`/proc/${pid}/pagemap`, "r");
	const found: number[] = [];
	for (const line of readFileSync(`/proc/${pid}/maps`, "utf8").split("\n")) {
		const [, begin, end] = /^(\w+)-(\w+) rw-p \S+ \S+ 0\s*(?:\[heap\])?$/.exec(line) ?? [];
		if (end === undefined) continue;
		for (const [first, last] of presentPages(pages, Number.parseInt(begin!, 16), Number.parseInt(end, 16))) {
			const bytes = Buffer.alloc(last - first);
			const there = bytes.subarray(0, readSync(memory, bytes, 0, bytes.length, first));
			for (let at = there.indexOf(needle); at >= 0; at = there.indexOf(needle, at + 1)) found.push(first + at);
		}
	}
	closeSync(pages);
	closeSync(memory);
	return found;
}

/** Runs of pages that are in memory: most of a JavaScript engine's mappings are reserved alone. */
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
