/** Resolves the address of the rendezvous. */
import { lookup } from "node:dns/promises";
import { isIP } from "node:net";
import { UserError } from "../../system/errors.ts";
import type { Place } from "../place.ts";
import { secretFileVariable, secretVariable } from "../secret.ts";
import { isLoopback } from "./socket-owner.ts";

const everyInterface = "0.0.0.0";
const retryInterval = 500;

/**
 * Numeric address of the rendezvous, at which the server listens and clients connect. Throws a UserError if the name does not
 * resolve within `milliseconds`, or if a run without a secret would listen where other hosts can reach it.
 */
export async function rendezvousAddress(place: Place, milliseconds: number): Promise<string> {
	const numeric = await resolve(place, performance.now() + milliseconds);
	const otherHosts = place.localSize < place.worldSize;
	// A host may resolve its own name to a loopback address (Debian: 127.0.1.1), at which other hosts cannot reach it.
	const hidden = isLoopback(numeric) && !isIP(place.address) && place.address !== "localhost" && otherHosts;
	if (place.secret === null && (hidden || !isLoopback(numeric))) {
		throw new UserError(
			`Other hosts can reach ${place.address}, where the ranks meet, and the run has no secret: set ${secretVariable} to the same random text for all ranks, as by export ${secretVariable}=$(head -c 32 /dev/urandom | base64) before srun or torchrun, or ${secretFileVariable} to a file of mode 600 that all hosts see.`,
		);
	}
	return hidden && place.rank === 0 ? everyInterface : numeric;
}

/** Resolves the address, or the fallback for a node name that only the batch system knows. */
async function resolve({ address, fallbackAddress }: Place, end: number): Promise<string> {
	while (true) {
		try {
			return (await lookup(address)).address;
		} catch (error) {
			if (fallbackAddress) return fallbackAddress;
			const code = (error as NodeJS.ErrnoException).code ?? "no answer";
			if (!/AGAIN|TIMEOUT/.test(code) || performance.now() + retryInterval > end) {
				throw new UserError(`MASTER_ADDR ${address} does not resolve on this host (${code}).`);
			}
			await Bun.sleep(retryInterval);
		}
	}
}
