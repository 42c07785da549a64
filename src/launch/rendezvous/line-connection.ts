/** Lines of text over TCP, with limits on their number, size and time. */

import { lookup } from "node:dns/promises";
import { readFileSync } from "node:fs";
import { connect, createServer, isIP, isIPv4, type Server, type Socket } from "node:net";
import { UserError } from "../../system/errors.ts";
import type { Place } from "../place.ts";
import { secretFileVariable, secretVariable } from "../secret.ts";

/** Most characters of a line, before the other side has authenticated and afterwards. */
const lineLimits = { unauthenticated: 512, authenticated: 1 << 20 };
/** Received lines that may wait to be read: each side waits for the answer to its latest message. */
const mostUnreadLines = 16;

/** Where a process listens: at a port (0: any free one) of an address, or at an abstract socket, which only its own host reaches. */
export type Endpoint = { readonly host: string; readonly port: number } | { readonly path: string };

/** "10.0.0.1:29500". */
export function describeEndpoint(endpoint: Endpoint): string {
	return "path" in endpoint ? "the first rank of this host" : `${endpoint.host}:${endpoint.port}`;
}

export class LineConnection implements Disposable {
	#rest = "";
	readonly #lines: string[] = [];
	#lineLimit = lineLimits.unauthenticated;
	#closed = false;
	#ending = false;
	#wake: (() => void) | null = null;

	constructor(
		private readonly socket: Socket,
		readonly from: string,
	) {
		socket.setNoDelay(true);
		socket.setEncoding("utf8");
		socket.on("data", (text: string) => this.#take(text));
		socket.on("close", () => this.#close());
		// "close" follows.
		socket.on("error", () => {});
	}

	/** Numeric address of the other side; "" when the connection is closed. */
	get address(): string {
		return this.socket.remoteAddress ?? "";
	}

	/** Numeric address of this side; "" when the connection is closed. */
	get localAddress(): string {
		return this.socket.localAddress ?? "";
	}

	get closed(): boolean {
		return this.#closed;
	}

	/** Whether the other side is a process of this user on this host; false for a connection that is closed. */
	isOwnUser(): Promise<boolean> {
		return isOwnUser(this.socket);
	}

	/** Fails with the system's error code. */
	static open(endpoint: Endpoint, milliseconds: number): Promise<LineConnection> {
		return new Promise((resolve, reject) => {
			const socket = connect(endpoint);
			const late = setTimeout(() => {
				socket.destroy();
				reject(Object.assign(new Error("No answer."), { code: "ETIMEDOUT" }));
			}, milliseconds);
			socket.once("error", (error) => {
				clearTimeout(late);
				reject(error);
			});
			socket.once("connect", () => {
				clearTimeout(late);
				resolve(new LineConnection(socket, describeEndpoint(endpoint)));
			});
		});
	}

	/** Allows the long lines of an authenticated side from now on. */
	raiseLineLimit(): void {
		this.#lineLimit = lineLimits.authenticated;
	}

	send(line: string): void {
		if (!this.#closed && !this.#ending) this.socket.write(`${line}\n`);
	}

	/** The next line; undefined when no line came in time or the other side has closed. */
	async receive(milliseconds: number): Promise<string | undefined> {
		const end = performance.now() + milliseconds;
		while (this.#lines.length === 0 && !this.#closed) {
			const left = end - performance.now();
			if (left <= 0) return undefined;
			await new Promise<void>((resolve) => {
				const timer = setTimeout(resolve, left);
				this.#wake = () => {
					clearTimeout(timer);
					resolve();
				};
			});
		}
		return this.#lines.shift();
	}

	/** Resolves when the connection is closed. */
	async ended(): Promise<void> {
		if (!this.#closed) await new Promise<void>((resolve) => this.socket.once("close", () => resolve()));
	}

	/** Closes the connection: sent lines still arrive, and no more lines are read. */
	[Symbol.dispose](): void {
		if (this.#closed || this.#ending) return;
		this.#ending = true;
		this.socket.end();
		this.socket.unref();
		// If the other side does not close, the connection is dropped after a second.
		setTimeout(() => this.socket.destroy(), 1000).unref();
	}

	/** Ends the connection at once. */
	drop(): void {
		this.socket.destroy();
	}

	#take(text: string): void {
		if (this.#ending) return;
		this.#rest += text;
		for (let end = this.#rest.indexOf("\n"); end >= 0; end = this.#rest.indexOf("\n")) {
			if (end > this.#lineLimit || this.#lines.length === mostUnreadLines) {
				this.#refuse();
				return;
			}
			this.#lines.push(this.#rest.slice(0, end));
			this.#rest = this.#rest.slice(end + 1);
		}
		if (this.#rest.length > this.#lineLimit) this.#refuse();
		else this.#wake?.();
	}

	/** Drops the connection because the other side has sent more than the limits allow. */
	#refuse(): void {
		this.#ending = true;
		this.#rest = "";
		this.#lines.length = 0;
		this.drop();
	}

	#close(): void {
		this.#closed = true;
		this.#wake?.();
	}
}

/** Listens at `endpoint`; resolves with the port, which is 0 for an abstract socket. Fails with the system's error code. */
export function listen(
	endpoint: Endpoint,
	accept: (connection: LineConnection) => void,
): Promise<{ readonly port: number; readonly server: Server }> {
	return new Promise((resolve, reject) => {
		const server = createServer((socket) => accept(new LineConnection(socket, socket.remoteAddress ?? "this host")));
		server.once("error", reject);
		server.listen({ ...endpoint, exclusive: true }, () => {
			const bound = server.address();
			resolve({ port: typeof bound === "object" && bound !== null ? bound.port : 0, server });
		});
	});
}

// The address of the rendezvous, and the owner of a socket there.

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
