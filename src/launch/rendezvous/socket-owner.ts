/** Finds the user at the other end of a connection of this host with itself, in the kernel's tables of sockets. */
import { readFileSync } from "node:fs";
import { isIPv4, type Socket } from "node:net";

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
