/** The thread of HashThread: an entry point of its own. It hashes until it is ended. */
import { digestBytes, HashRing, SlotState, slotCount } from "./hash-ring.ts";

declare const self: Worker;

self.onmessage = ({ data: memory }: MessageEvent<SharedArrayBuffer>) => {
	const ring = new HashRing(memory);
	let hasher = new Bun.CryptoHasher("sha256");
	for (let slot = 0; ; slot = (slot + 1) % slotCount) {
		const state = ring.wait(slot, SlotState.free, "left");
		const at = ring.stateAt(slot);
		if (state === SlotState.bytes) hasher.update(ring.slot(slot).subarray(0, ring.words[at + 1]));
		else {
			ring.digests.set(hasher.digest(), ring.words[at + 2]! * digestBytes);
			hasher = new Bun.CryptoHasher("sha256");
		}
		ring.set(slot, SlotState.free);
		if (state === SlotState.end && ring.words[at + 2] === ring.digests.length / digestBytes - 1) return;
	}
};
