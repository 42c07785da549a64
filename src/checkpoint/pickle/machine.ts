/**
 * A restricted pickle machine (docs/spec/checkpoint.md §1.3, §2). A pickle is a program; this interpreter runs the
 * opcodes that build plain data, and looks every class or function name up in a fixed table. It calls only functions of that
 * table, sets no properties of JavaScript objects, and refuses any other opcode. Truncated or oversized input is an error
 * without a partial result.
 */
import { Cursor, PickleStack, type StackLimits } from "./operands.ts";
import { Global, NumpyArray, NumpyDtype, PythonObject, Tuple } from "./values.ts";

/** Allowed uses of a global: as a function (REDUCE), as a class to instantiate (NEWOBJ), or as a value. */
export interface AllowedGlobal {
	readonly value?: unknown;
	readonly call?: (args: readonly unknown[]) => unknown;
	readonly create?: (args: readonly unknown[]) => unknown;
}

/** Looks up a global; the pickle is refused where this returns undefined. */
export type AllowedGlobals = (module: string, name: string) => AllowedGlobal | undefined;

export interface PickleLimits extends StackLimits {
	readonly bytes: number;
	readonly string: number;
	/** Containers, strings, instances, entries of dicts and items that calls copy, of about 100 bytes each. */
	readonly values: number;
}

const defaultLimits: PickleLimits = {
	bytes: 2 ** 27,
	stack: 100_000,
	marks: 10_000,
	memo: 2 ** 23,
	string: 2 ** 26,
	values: 2 ** 23,
};

/** Characters of a string that count as one value when a call copies them. */
const CHARACTERS_A_VALUE = 64;
/** Items of a list or tuple that count as one value. */
const ITEMS_A_VALUE = 4;

export interface UnpickleOptions {
	readonly allowed: AllowedGlobals;
	/** The object that a persistent id stands for; absent: persistent ids are refused. */
	readonly persistent?: (id: unknown) => unknown;
	readonly limits?: Partial<PickleLimits>;
}

/** Reads one pickle; `where`, such as "file.pt", begins every error. */
export function unpickle(bytes: Uint8Array, where: string, options: UnpickleOptions): unknown {
	return new Machine(bytes, where, options).run();
}

/** A global on the stack, with its allowed uses. */
class Reference {
	constructor(
		readonly name: Global,
		readonly allowed: AllowedGlobal,
	) {}
}

class Machine {
	/** The action of each opcode. */
	static readonly #opcodes: Readonly<Record<number, (m: Machine) => void>> = {
		128: (m) => m.#protocol(m.#cursor.byte()), // PROTO
		149: (m) => m.#cursor.length(m.#cursor.u64()), // FRAME
		40: (m) => m.#stack.mark(), // MARK
		48: (m) => m.#stack.drop(), // POP
		49: (m) => m.#stack.popMark(), // POP_MARK
		50: (m) => m.#stack.push(m.#stack.top()), // DUP
		78: (m) => m.#stack.push(null), // NONE
		136: (m) => m.#stack.push(true), // NEWTRUE
		137: (m) => m.#stack.push(false), // NEWFALSE
		75: (m) => m.#stack.push(m.#cursor.byte()), // BININT1
		77: (m) => m.#stack.push(m.#cursor.u16()), // BININT2
		74: (m) => m.#stack.push(m.#cursor.i32()), // BININT
		138: (m) => m.#make(m.#cursor.integer(m.#cursor.byte())), // LONG1
		139: (m) => m.#make(m.#cursor.integer(m.#cursor.u32())), // LONG4
		71: (m) => m.#stack.push(m.#cursor.f64()), // BINFLOAT
		140: (m) => m.#make(m.#cursor.text(m.#cursor.byte())), // SHORT_BINUNICODE
		88: (m) => m.#make(m.#cursor.text(m.#cursor.u32())), // BINUNICODE
		141: (m) => m.#make(m.#cursor.text(m.#cursor.u64())), // BINUNICODE8
		67: (m) => m.#make(m.#cursor.data(m.#cursor.byte())), // SHORT_BINBYTES
		66: (m) => m.#make(m.#cursor.data(m.#cursor.u32())), // BINBYTES
		142: (m) => m.#make(m.#cursor.data(m.#cursor.u64())), // BINBYTES8
		85: (m) => m.#make(m.#cursor.latin(m.#cursor.byte())), // SHORT_BINSTRING
		84: (m) => m.#make(m.#cursor.latin(m.#cursor.u32())), // BINSTRING
		93: (m) => m.#make([]), // EMPTY_LIST
		97: (m) => m.#append([m.#stack.pop()]), // APPEND
		101: (m) => m.#append(m.#stack.popMark()), // APPENDS
		125: (m) => m.#make(new Map()), // EMPTY_DICT
		115: (m) => m.#setItems(m.#stack.popCount(2)), // SETITEM
		117: (m) => m.#setItems(m.#stack.popMark()), // SETITEMS
		41: (m) => m.#make(new Tuple([])), // EMPTY_TUPLE
		133: (m) => m.#make(new Tuple(m.#stack.popCount(1).map(plain))), // TUPLE1
		134: (m) => m.#make(new Tuple(m.#stack.popCount(2).map(plain))), // TUPLE2
		135: (m) => m.#make(new Tuple(m.#stack.popCount(3).map(plain))), // TUPLE3
		116: (m) => m.#makeOf(m.#stack.popMark(), (items) => new Tuple(items)), // TUPLE
		143: (m) => m.#make(new Set()), // EMPTY_SET
		144: (m) => m.#addItems(m.#stack.popMark()), // ADDITEMS
		145: (m) => m.#makeOf(m.#stack.popMark(), (items) => new Set(items)), // FROZENSET
		113: (m) => m.#stack.remember(m.#cursor.byte()), // BINPUT
		114: (m) => m.#stack.remember(m.#cursor.u32()), // LONG_BINPUT
		148: (m) => m.#stack.remember(), // MEMOIZE
		104: (m) => m.#stack.recall(m.#cursor.byte()), // BINGET
		106: (m) => m.#stack.recall(m.#cursor.u32()), // LONG_BINGET
		99: (m) => m.#global(m.#cursor.line(), m.#cursor.line()), // GLOBAL
		147: (m) => m.#global(...(m.#stack.popCount(2) as [unknown, unknown])), // STACK_GLOBAL
		82: (m) => m.#invoke("call"), // REDUCE
		129: (m) => m.#invoke("create"), // NEWOBJ
		98: (m) => m.#build(plain(m.#stack.pop())), // BUILD
		81: (m) => m.#persistent(m.#stack.pop()), // BINPERSID
	};

	readonly #cursor: Cursor;
	readonly #limits: PickleLimits;
	readonly #stack: PickleStack;
	readonly #references = new Map<string, Reference>();
	#values = 0;

	constructor(
		bytes: Uint8Array,
		where: string,
		readonly options: UnpickleOptions,
	) {
		this.#limits = { ...defaultLimits, ...options.limits };
		this.#cursor = new Cursor(bytes, where, this.#limits.string);
		this.#stack = new PickleStack(this.#limits, (reason) => this.#refuse(reason));
		if (bytes.byteLength > this.#limits.bytes) this.#refuse(`it has ${bytes.byteLength} bytes`);
	}

	run(): unknown {
		try {
			for (;;) {
				const opcode = this.#cursor.byte();
				if (opcode === 0x2e) return this.#result();
				this.#step(opcode);
			}
		} catch (error) {
			// setState and functions of allowed globals throw RangeErrors, without the position.
			if (error instanceof RangeError) this.#refuse(error.message);
			throw error;
		}
	}

	#charge(values: number): void {
		this.#values += values;
		if (this.#values > this.#limits.values) this.#refuse(`it makes more than ${this.#limits.values} values`);
	}

	#make(value: unknown): void {
		this.#charge(1);
		this.#stack.push(value);
	}

	#makeOf(items: readonly unknown[], container: (items: unknown[]) => unknown): void {
		this.#charge(items.length / ITEMS_A_VALUE);
		this.#make(container(items.map(plain)));
	}

	#refuse(reason: string): never {
		return this.#cursor.refuse(reason);
	}

	#result(): unknown {
		const value = this.#stack.pop();
		if (!this.#stack.empty) this.#refuse("it ends with more than one value on its stack");
		if (value instanceof Reference && value.allowed.value === undefined) this.#refuse(`it is ${value.name}`);
		return plain(value);
	}

	#step(opcode: number): void {
		const action = Machine.#opcodes[opcode];
		if (action === undefined) {
			this.#cursor.position--;
			this.#refuse(`opcode 0x${opcode.toString(16).padStart(2, "0")} is not allowed`);
		}
		action(this);
	}

	#protocol(version: number): void {
		if (version > 5) this.#refuse("its protocol is unknown");
	}

	#addItems(items: readonly unknown[]): void {
		const set = this.#stack.top();
		if (!(set instanceof Set)) this.#refuse("it adds to a value that is not a set");
		this.#charge(items.length);
		for (const item of items) set.add(plain(item));
	}

	#build(state: unknown): void {
		setState(this.#stack.top(), state);
	}

	#persistent(id: unknown): void {
		if (!this.options.persistent) this.#refuse("it refers to a storage, and there is none here");
		this.#stack.push(this.options.persistent(id));
	}

	#global(module: unknown, name: unknown): void {
		if (typeof module !== "string" || typeof name !== "string") {
			this.#refuse("it names a class by a value that is not text");
		}
		const key = `${module} ${name}`;
		let reference = this.#references.get(key);
		if (!reference) {
			const allowed = this.options.allowed(module, name);
			if (!allowed) this.#refuse(`${module}.${name} is not on the list of allowed names`);
			reference = new Reference(new Global(module, name), allowed);
			this.#references.set(key, reference);
		}
		this.#stack.push(reference);
	}

	#invoke(how: "call" | "create"): void {
		const [callee, args] = this.#stack.popCount(2);
		if (!(callee instanceof Reference)) this.#refuse("it calls a value that is not a class");
		if (!(args instanceof Tuple)) this.#refuse(`it calls ${callee.name} without a tuple`);
		const action = callee.allowed[how];
		if (!action) this.#refuse(`${callee.name} may not be called this way`);
		// A few bytes of the pickle (BINGET) can pass a large memoized list or string to a call, which copies it.
		for (const item of args.items) this.#charge(weightOf(item));
		this.#make(action(args.items));
	}

	#append(items: unknown[]): void {
		const list = this.#stack.top();
		if (list instanceof PythonObject) list.items ??= [];
		const target = list instanceof PythonObject ? list.items : list;
		if (!Array.isArray(target)) this.#refuse("it appends to a value that is not a list");
		this.#charge(items.length / ITEMS_A_VALUE);
		for (const item of items) target.push(plain(item));
	}

	#setItems(items: unknown[]): void {
		const top = this.#stack.top();
		if (top instanceof PythonObject) top.entries ??= new Map();
		const map = top instanceof PythonObject ? top.entries : top;
		if (!(map instanceof Map) || items.length % 2 !== 0) this.#refuse("it sets items of a value that is not a dict");
		// An entry counts as two values: its key and its value.
		this.#charge(items.length);
		for (let i = 0; i < items.length; i += 2) map.set(plain(items[i]), plain(items[i + 1]));
	}
}

/** Number of values that a function may copy from an argument. */
function weightOf(value: unknown): number {
	if (Array.isArray(value)) return value.length;
	if (value instanceof Tuple) return value.items.length;
	if (value instanceof Set || value instanceof Map) return value.size;
	return typeof value === "string" ? value.length / CHARACTERS_A_VALUE : 0;
}

/** The value of a global that the pickle stores as data; other values unchanged. */
function plain(value: unknown): unknown {
	if (!(value instanceof Reference)) return value;
	return value.allowed.value ?? value.name;
}

/** Sets the state of an instance. Throws a RangeError for an instance without state, or for an invalid state. */
function setState(instance: unknown, state: unknown): void {
	if (instance instanceof PythonObject) {
		if (instance.state !== undefined) throw new RangeError(`it sets the state of a ${instance.type} twice`);
		instance.state = state;
	} else if (instance instanceof NumpyDtype) {
		const order = state instanceof Tuple ? state.items[1] : null;
		if (order !== "<" && order !== ">" && order !== "|" && order !== "=") {
			throw new RangeError("a numpy dtype has an invalid state");
		}
		instance.bigEndian = order === ">";
	} else if (instance instanceof NumpyArray) {
		setArray(instance, state);
	} else if (!(instance instanceof Map && state instanceof Map)) {
		// Attributes of an OrderedDict are dropped.
		throw new RangeError("it sets the state of a value that has no state");
	}
}

/** `state`: the argument of numpy.ndarray.__setstate__, (version, shape, dtype, Fortran order, bytes or list of objects). */
function setArray(array: NumpyArray, state: unknown): void {
	const [, shape, dtype, fortran, data] = state instanceof Tuple ? state.items : [];
	if (
		!(shape instanceof Tuple) ||
		!shape.items.every((size) => Number.isSafeInteger(size) && (size as number) >= 0) ||
		!(dtype instanceof NumpyDtype) ||
		!(data instanceof Uint8Array || Array.isArray(data))
	) {
		throw new RangeError("a numpy array has an invalid state");
	}
	array.shape = shape.items as number[];
	array.dtype = dtype;
	array.fortranOrder = fortran === true;
	array.data = data;
}
