/** The two seeds Energon derives by SHA-1 (docs/spec/energon.md §2.1, §5.3). */
import { CryptoHasher } from "bun";

function sha1(text: string): DataView {
	const digest = new CryptoHasher("sha1").update(text).digest();
	return new DataView(digest.buffer, digest.byteOffset, digest.byteLength);
}

/** Seed of a global worker: the last four bytes, big endian, of SHA-1("<worker>,<offset>"). */
export function workerSeed(globalWorkerId: number, seedOffset: number): number {
	return sha1(`${globalWorkerId},${seedOffset}`).getUint32(16, false);
}

/** Seed of one call with `restoreSeeds`: the first four bytes, big endian, of SHA-1("<worker seed>|<sample index>"). */
export function callSeed(seedOfWorker: number, sampleIndex: number): number {
	return sha1(`${seedOfWorker}|${sampleIndex}`).getUint32(0, false);
}
