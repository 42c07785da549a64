/** Shared by all commands: checks of declared flags, which citty leaves out, and the message and exit code of an error. */
import { type ArgsDef, type CommandDef, parseArgs } from "citty";
import { nearestHint } from "../config/names.ts";
import { Status } from "../native/abi.ts";
import { errorsOf, messageOf, NativeError, UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { systemReason } from "../system/system-errors.ts";

/** Refuses unknown flags, which citty ignores, naming the nearest known one. */
export function checkFlags(args: readonly string[], known: ArgsDef): void {
	const names = Object.keys(known);
	for (const argument of args) {
		// A negative number is a flag's value.
		if (!argument.startsWith("-") || argument === "-" || /^-\.?\d/.test(argument)) continue;
		const name = argument.replace(/^--?/, "").split("=")[0]!;
		const positive = name.startsWith("no-") ? name.slice(3) : name;
		if (names.includes(name) || known[positive]?.type === "boolean") continue;
		const hint = nearestHint(name, [...names, "help"], "--");
		throw new UserError(`${argument}: there is no such flag${hint}.`, exitCodes.usage);
	}
}

/** Refuses surplus positional arguments, which citty ignores. A positional whose valueHint ends with … takes any number. */
export function checkPositionals(args: readonly string[], known: ArgsDef, path: string): void {
	const positionals = Object.entries(known).filter(([, { type }]) => type === "positional");
	if (positionals.some(([, { valueHint }]) => valueHint?.endsWith("…"))) return;
	const surplus = parseArgs([...args], known)._[positionals.length];
	if (surplus === undefined) return;
	const takes = positionals.length === 0 ? "flags alone" : positionals.map(([name]) => name.toUpperCase()).join(" ");
	throw new UserError(`${surplus}: \`${path}\` takes ${takes}; \`${path} --help\` lists its flags.`, exitCodes.usage);
}

/** The help of a command with declared flags, in the layout of the configured commands: `path` is the command as typed. */
// biome-ignore lint/suspicious/noExplicitAny: citty's own type of a command with any arguments.
export async function usage(command: CommandDef<any>, path: string): Promise<string> {
	const args = Object.entries((command.args ?? {}) as ArgsDef);
	const below = Object.entries((command.subCommands ?? {}) as Record<string, () => Promise<CommandDef>>);
	const positionals = args
		.filter(([, { type }]) => type === "positional")
		.map(([name, { required }]) => (required === false ? ` [${name.toUpperCase()}]` : ` ${name.toUpperCase()}`));
	const form =
		below.length > 0 ? " COMMAND" : `${positionals.join("")}${args.length > positionals.length ? " [FLAGS]" : ""}`;
	const descriptionOf = ({ meta }: CommandDef) => (meta as { description?: string } | undefined)?.description ?? "";
	const commands = below.map(async ([name, load]) => `  ${name.padEnd(14)}${descriptionOf(await load())}`);
	return [
		`${path}${form}\n\n${descriptionOf(command as CommandDef)}\n`,
		...(await Promise.all(commands)),
		...args.map(([name, arg]) => {
			const value = arg.valueHint ?? name.toUpperCase();
			const negated = arg.type === "boolean" && arg.default === true;
			const flag = arg.type === "boolean" ? `--${negated ? "no-" : ""}${name}` : `--${name} ${value}`;
			const fixed = arg.type !== "boolean" && "default" in arg ? ` [${arg.default}]` : "";
			const off = negated ? "Turn off: " : "";
			return `  ${arg.type === "positional" ? name.toUpperCase() : flag}\n      ${off}${arg.description ?? ""}${fixed}`;
		}),
	].join("\n");
}

/** Statuses of the native library that are not bugs; the library's sentence says what to do. */
const userStatuses: readonly number[] = [Status.unsupported, Status.device, Status.peer];

/** System errors about resources that the machine grants this process, wherever they are thrown. */
const scarce: readonly string[] = ["EMFILE", "ENFILE", "ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ENOMEM", "EAGAIN"];

interface ErrorDescription {
	readonly sentence: string;
	readonly exitCode: number;
}

/** The text for standard error and the exit code of an error. Errors that are not bugs have no stack trace. */
export function describeError(error: unknown): ErrorDescription {
	const [first, ...later] = errorsOf(error).map(describeOne);
	return { ...first!, sentence: [first!, ...later].map(({ sentence }) => sentence).join(" Then: ") };
}

function describeOne(error: unknown): ErrorDescription {
	if (error instanceof UserError) return { sentence: error.message, exitCode: error.exitCode };
	if (error instanceof Error && error.name === "CLIError") {
		return { sentence: `${Bun.stripANSI(error.message)}.`, exitCode: exitCodes.usage };
	}
	if (error instanceof NativeError) {
		if (error.status === Status.outOfMemory) {
			const sentence = /^Out of /.test(error.message) ? error.message : `Out of memory: ${error.message}`;
			return { sentence, exitCode: exitCodes.failure };
		}
		if (userStatuses.includes(error.status)) return { sentence: error.message, exitCode: exitCodes.failure };
	}
	if (error instanceof RangeError && /out of memory|allocat/i.test(error.message)) {
		const more = /^out of memory\.?$/i.test(error.message) ? "" : `: ${error.message}`;
		return { sentence: `Out of memory${more}.`, exitCode: exitCodes.failure };
	}
	const { code, syscall, path } = (error ?? {}) as Partial<NodeJS.ErrnoException>;
	if (code !== undefined && scarce.includes(code)) {
		const what = `${syscall ?? "a request"}${path ? ` of ${path}` : ""}`;
		return { sentence: `The system refused ${what}: ${systemReason(error)}.`, exitCode: exitCodes.failure };
	}
	return {
		sentence: `Unexpected error: ${messageOf(error).replace(/\.$/, "")}. MIMO_DEBUG=1 shows where.`,
		exitCode: exitCodes.unexpected,
	};
}

/** Writes the stack traces of an error to standard error, for MIMO_DEBUG=1. */
export function printStacks(error: unknown): void {
	for (const one of errorsOf(error)) if (one instanceof Error) process.stderr.write(`${one.stack}\n`);
}
