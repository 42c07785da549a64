/** Lines of text over TCP, with limits on their number, size and time. */
import { connect, createServer, type Server, type Socket } from "node:net";
import { isOwnUser } from "./socket-owner.ts";

/** Characters of a line: from a stranger, which may only send its proof, and from a side that has given its proof. */
const longest = { stranger: 512, trusted: 1 << 20 };
/** Lines that wait to be read; each side answers before it is asked again. */
const mostWaiting = 16;

/** Where a process listens: at a port (0: any that is free) of an address, or, for others of its host alone, at a name. */
export type Spot = { readonly host: string; readonly port: number } | { readonly path: string };

/** "10.0.0.1:29500". */
export function describeSpot(spot: Spot): string {
	return "path" in spot ? "the first rank of this host" : `${spot.host}:${spot.port}`;
}

export class LineConnection implements Disposable {
	#rest = "";
	readonly #lines: string[] = [];
	#longest = longest.stranger;
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

	/** The other side's, numeric; "" when the connection is gone. */
	get address(): string {
		return this.socket.remoteAddress ?? "";
	}

	/** This side's, numeric; "" when the connection is gone. */
	get localAddress(): string {
		return this.socket.localAddress ?? "";
	}

	get closed(): boolean {
		return this.#closed;
	}

	/** Whether the other side is a process of this user on this host. */
	isOwnUser(): boolean {
		return isOwnUser(this.socket);
	}

	/** Fails with the system's error code. */
	static open(spot: Spot, milliseconds: number): Promise<LineConnection> {
		return new Promise((resolve, reject) => {
			const socket = connect(spot);
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
				resolve(new LineConnection(socket, describeSpot(spot)));
			});
		});
	}

	/** Lines may be long from now on. */
	trust(): void {
		this.#longest = longest.trusted;
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

	/** Resolves when the other side has gone. */
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
			if (end > this.#longest || this.#lines.length === mostWaiting) {
				this.#refuse();
				return;
			}
			this.#lines.push(this.#rest.slice(0, end));
			this.#rest = this.#rest.slice(end + 1);
		}
		if (this.#rest.length > this.#longest) this.#refuse();
		else this.#wake?.();
	}

	/** Ends the connection: the other side has sent more than is allowed. */
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

/** Listens; `port` 0: at a name. Fails with the system's error code. */
export function listen(
	spot: Spot,
	accept: (connection: LineConnection) => void,
): Promise<{ readonly port: number; readonly server: Server }> {
	return new Promise((resolve, reject) => {
		const server = createServer((socket) => accept(new LineConnection(socket, socket.remoteAddress ?? "this host")));
		server.once("error", reject);
		server.listen({ ...spot, exclusive: true }, () => {
			const bound = server.address();
			resolve({ port: typeof bound === "object" && bound !== null ? bound.port : 0, server });
		});
	});
}
