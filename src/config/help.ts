/** Help and documentation of the configuration, made from the schema. */
import type { Field } from "./field.ts";
import { fieldOf, type Key, subjects } from "./schema.ts";

/** How the default is spoken of. */
function defaultOf(field: Field): string {
	if (field.presence === "required") return "required";
	if (field.presence === "derived") return field.derivation!;
	if (field.presence === "optional") return "unset";
	return Array.isArray(field.default) ? field.default.join(",") : String(field.default);
}

/** One line of help. */
function sentences(field: Field): string {
	const parts = [field.description];
	if (field.alwaysOn) parts.push("Always so here.");
	if (field.noEffect !== undefined) parts.push(`Without effect here: ${field.noEffect}.`);
	if (field.megatron !== undefined) parts.push(`Megatron's default: ${field.megatron}.`);
	return parts.join(" ");
}

const groups = Object.entries(subjects).map(([subject, group]) => ({
	subject,
	keys: Object.keys(group) as Key[],
}));

/** Every flag with its description and default. */
export function flagHelp(): string {
	return groups
		.map(({ subject, keys }) => {
			const lines = keys.map((key) => {
				const field = fieldOf(key);
				const value = field.type.kind === "boolean" ? "" : ` ${field.type.placeholder}`;
				return `  --${key}${value}\n      ${sentences(field)} [${defaultOf(field)}]`;
			});
			return `${subject}\n${lines.join("\n")}`;
		})
		.join("\n\n");
}

/** The generated part of docs/configuration.md: differences from Megatron, then a table a subject. */
export function configurationMarkdown(): string {
	const table = (rows: string[][], head: string[]) =>
		[head, head.map(() => "---"), ...rows].map((row) => `| ${row.map(cell).join(" | ")} |`).join("\n");
	const all = groups.flatMap(({ keys }) => keys);
	const different = all.filter((key) => fieldOf(key).megatron !== undefined);
	const inert = all.filter((key) => fieldOf(key).alwaysOn || fieldOf(key).noEffect !== undefined);
	return [
		"## Defaults that differ from Megatron's",
		table(
			different.map((key) => [code(key), defaultOf(fieldOf(key)), fieldOf(key).megatron!]),
			["key", "here", "Megatron"],
		),
		"## Flags that are accepted and change nothing",
		table(
			inert.map((key) => [code(key), fieldOf(key).noEffect ?? "always so here"]),
			["key", "why"],
		),
		...groups.map(
			({ subject, keys }) =>
				`## ${subject}\n\n${table(
					keys.map((key) => [code(key), fieldOf(key).type.allowed, defaultOf(fieldOf(key)), fieldOf(key).description]),
					["key", "allowed", "default", "meaning"],
				)}`,
		),
	].join("\n\n");
}

const code = (key: string) => `\`${key}\``;
const cell = (text: string) => text.replaceAll("|", "\\|").replaceAll("*", "\\*");
