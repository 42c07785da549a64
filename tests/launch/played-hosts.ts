/**
 * Hosts played by network namespaces of this machine, joined by a bridge in one more: their processes reach each other over it
 * alone, and each link can be cut or slowed. They share the machine's memory, so that the CPU library joins their ranks. Needs root.
 */
import { absent, hasPrograms } from "../absent.ts";

/** Whether there can be some here. */
export function canPlayHosts(): boolean {
	if (!hasPrograms(["ip", "tc"], "iproute2")) return false;
	const name = `mimo-try-${process.pid}`;
	const made = Bun.spawnSync(["ip", "netns", "add", name], { stderr: "ignore" }).success;
	if (made) Bun.spawnSync(["ip", "netns", "delete", name]);
	return made || absent("the right to make network namespaces", "root, outside a container") !== null;
}

function run(...command: readonly string[]): void {
	const { success, stderr } = Bun.spawnSync([...command], { stderr: "pipe" });
	if (!success) throw new Error(`${command.join(" ")}: ${stderr}`);
}

let made = 0;

export class PlayedHosts implements Disposable {
	readonly #name = `mimo-${process.pid}-${made++}`;
	readonly #bridge = `${this.#name}-bridge`;

	constructor(readonly count: number) {
		run("ip", "netns", "add", this.#bridge);
		run("ip", "-n", this.#bridge, "link", "add", "bridge", "type", "bridge");
		run("ip", "-n", this.#bridge, "link", "set", "bridge", "up");
		for (let host = 0; host < count; host++) {
			const space = this.#space(host);
			run("ip", "netns", "add", space);
			const there = ["peer", "name", `host${host}`, "netns", this.#bridge];
			run("ip", "link", "add", "eth0", "netns", space, "type", "veth", ...there);
			run("ip", "-n", this.#bridge, "link", "set", `host${host}`, "master", "bridge", "up");
			run("ip", "-n", space, "address", "add", `${this.address(host)}/24`, "dev", "eth0");
			for (const device of ["lo", "eth0"]) run("ip", "-n", space, "link", "set", device, "up");
		}
	}

	address(host: number): string {
		return `10.77.0.${host + 1}`;
	}

	/** Begins a command that runs on a host. */
	on(host: number): string[] {
		return ["ip", "netns", "exec", this.#space(host)];
	}

	/** Cuts a host's link to the others: what they send is lost, and no connection ends. */
	cut(host: number): void {
		run("ip", "-n", this.#bridge, "link", "set", `host${host}`, "down");
	}

	/** A host's link carries so many kilobits a second, each way. */
	slow(host: number, kilobits: number): void {
		const queue = ["root", "tbf", "rate", `${kilobits}kbit`, "burst", "1600", "latency", "3s"];
		run("tc", "-n", this.#bridge, "qdisc", "replace", "dev", `host${host}`, ...queue);
		run("tc", "-n", this.#space(host), "qdisc", "replace", "dev", "eth0", ...queue);
	}

	/** Undoes cut() and slow(). */
	mend(host: number): void {
		run("ip", "-n", this.#bridge, "link", "set", `host${host}`, "up");
		for (const at of [
			[this.#bridge, `host${host}`],
			[this.#space(host), "eth0"],
		] as const)
			Bun.spawnSync(["tc", "-n", at[0], "qdisc", "delete", "dev", at[1], "root"], { stderr: "ignore" });
	}

	#space(host: number): string {
		return `${this.#name}-${host}`;
	}

	[Symbol.dispose](): void {
		const spaces = Array.from({ length: this.count }, (_, host) => this.#space(host));
		for (const space of [...spaces, this.#bridge])
			Bun.spawnSync(["ip", "netns", "delete", space], { stderr: "ignore" });
	}
}
