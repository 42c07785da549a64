/** A thread of HashThreads: an entry point of its own. It hashes until it is told that there is no more. */
import { HashRing, SlotState, slotCount } from "./hash-ring.ts";

declare const self: Worker;

self.onmessage = ({ data: memory }: MessageEvent<SharedArrayBuffer>) => {
	const ring = new HashRing(memory);
	let hasher = new Bun.CryptoHasher("sha256");
	for (let slot = 0; ; slot = (slot + 1) % slotCount) {
		const state = ring.wait(slot, "hasher");
		if (state === SlotState.over) return;
		if (state === SlotState.bytes) {
			hasher.update(ring.slot(slot).subarray(0, ring.lengthOf(slot)));
			ring.set(slot, SlotState.free);
		} else {
			ring.slot(slot).set(hasher.digest());
			hasher = new Bun.CryptoHasher("sha256");
			ring.set(slot, SlotState.digest);
		}
	}
};
