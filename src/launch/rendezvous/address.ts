/** The address of the rendezvous, and the owner of a socket there. */
import { lookup } from "node:dns/promises";
import { readFileSync } from "node:fs";
import { isIP, isIPv4, type Socket } from "node:net";
import { UserError } from "../../system/errors.ts";
import type { Place } from "../place.ts";
import { secretFileVariable, secretVariable } from "../secret.ts";

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

// Finds the user at the other end of a connection of this host with itself, in the kernel's tables of sockets.

/** Where processes of one host meet. */
export const loopback = "127.0.0.1";

/** Whether an address is one that this host alone can reach. */
export function isLoopback(address: string): boolean {
	return /^(::ffff:)?127\.\d+\.\d+\.\d+$/i.test(address) || address === "::1";
}

/** Whether the process at the other end of a loopback connection belongs to the user of this process; false for a closed one. */
export async function isOwnUser(socket: Socket): Promise<boolean> {
	for (let search = 0; search < 3; search++) {
		// A search takes milliseconds: none is made for one of many connections that are closed as soon as they are open.
		await Bun.sleep(1 + 10 * search);
		if (socket.destroyed) return false;
		const owner = ownerOf(socket);
		// A row may be skipped when the table changes while it is read.
		if (owner !== null) return owner === process.geteuid!();
	}
	return false;
}

/** The user of the process at the other end of a loopback connection; null: unknown. A socket that is closed belongs to user 0. */
function ownerOf(socket: Socket): number | null {
	const { remoteAddress, remotePort, localAddress, localPort } = socket;
	if (!remoteAddress || !localAddress || !isLoopback(remoteAddress) || !isLoopback(localAddress)) return null;
	const theirs = `${tableAddress(remoteAddress)}:${tablePort(remotePort!)}`;
	const ours = `${tableAddress(localAddress)}:${tablePort(localPort!)}`;
	const table = isIPv4(remoteAddress) ? "/proc/net/tcp" : "/proc/net/tcp6";
	const row = RegExp(`^ *\\d+: ${theirs} ${ours} \\w+ \\S+ \\S+ \\S+ +(\\d+) `, "m");
	const user = row.exec(readTable(table))?.[1];
	return user === undefined ? null : Number(user);
}

function readTable(path: string): string {
	try {
		return readFileSync(path, "utf8");
	} catch {
		return "";
	}
}

/** An address as the tables spell it: words of four bytes, each with its lowest byte first. */
function tableAddress(address: string): string {
	if (address === "::1") return `${"0".repeat(24)}01000000`;
	const bytes = address.replace(/^::ffff:/i, "").split(".");
	const word = bytes.toReversed().map((byte) => hexadecimal(Number(byte), 2));
	return isIPv4(address) ? word.join("") : `${"0".repeat(16)}FFFF0000${word.join("")}`;
}

function tablePort(port: number): string {
	return hexadecimal(port, 4);
}

function hexadecimal(value: number, digits: number): string {
	return value.toString(16).toUpperCase().padStart(digits, "0");
}
