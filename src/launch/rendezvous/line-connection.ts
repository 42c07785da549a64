/** Lines of text over TCP, with limits on their number, size and time. */
import { connect, createServer, type Server, type Socket } from "node:net";
import { isOwnUser } from "./address.ts";

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
