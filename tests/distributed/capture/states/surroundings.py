"""State that no part of a program holds: settings of libraries, files, clocks, what is not there.

The texts are parts of programs, as those of `kinds`.
"""

import attrs


@attrs.frozen
class Surrounding:
    """Something that a step may ask for.

    Args:
        name: What it is, for people.
        read: The expression that reads a number: 1.0 before the change.
        changed: The statement that changes it; `self` is the layer.
        undone: The statement that puts it back.
        before: Definitions at the beginning of the module.
        of_self: Whether it is about an attribute of the layer, the model, the loss itself.
    """

    name: str
    read: str
    changed: str
    undone: str = "pass"
    before: str = ""
    of_self: bool = False


def flag(name, read, switch, on="True", off="False"):
    return Surrounding(name, f"1.0 + ({read})", f"{switch}({on})", f"{switch}({off})")


SETTINGS = (
    flag("anomalies", "torch.is_anomaly_enabled()", "torch.autograd.set_detect_anomaly"),
    flag(
        "precision of products",
        "torch.get_float32_matmul_precision() != 'highest'",
        "torch.set_float32_matmul_precision",
        "'high'",
        "'highest'",
    ),
    flag("threads", "torch.get_num_threads() == 2", "torch.set_num_threads", "2", "1"),
    flag(
        "deterministic operators",
        "torch.are_deterministic_algorithms_enabled()",
        "torch.use_deterministic_algorithms",
    ),
    flag("warnings of torch", "torch.is_warn_always_enabled()", "torch.set_warn_always"),
    Surrounding(
        "a flag of a backend",
        "1.0 + torch.backends.cudnn.benchmark",
        "torch.backends.cudnn.benchmark = True",
        "torch.backends.cudnn.benchmark = False",
    ),
    flag(
        "the default dtype",
        "torch.get_default_dtype() == torch.float64",
        "torch.set_default_dtype",
        "torch.float64",
        "torch.float32",
    ),
    flag(
        "the dtype policy",
        "keras.config.dtype_policy().name == 'mixed_bfloat16'",
        "keras.config.set_dtype_policy",
        "'mixed_bfloat16'",
        "'float32'",
    ),
    flag(
        "the epsilon of Keras",
        "keras.config.epsilon() > 1e-6",
        "keras.config.set_epsilon",
        "1e-5",
        "1e-7",
    ),
    flag(
        "the image format of Keras",
        "keras.config.image_data_format() == 'channels_first'",
        "keras.config.set_image_data_format",
        "'channels_first'",
        "'channels_last'",
    ),
    Surrounding(
        "tracebacks of Keras",
        "1.0 + (not keras.config.is_traceback_filtering_enabled())",
        "keras.config.disable_traceback_filtering()",
        "keras.config.enable_traceback_filtering()",
    ),
    Surrounding(
        "errors of NumPy",
        "1.0 + (np.geterr()['over'] == 'raise')",
        "np.seterr(over='raise')",
        "np.seterr(over='warn')",
    ),
    Surrounding(
        "prints of NumPy",
        "np.get_printoptions()['precision'] - 7.0",
        "np.set_printoptions(precision=9)",
        "np.set_printoptions(precision=8)",
    ),
    Surrounding(
        "the precision of decimals",
        "decimal.getcontext().prec - 27.0",
        "decimal.getcontext().prec = 29",
        "decimal.getcontext().prec = 28",
    ),
    Surrounding(
        "a level of a logger",
        "1.0 + logging.getLogger('surroundings').isEnabledFor(10)",
        "logging.getLogger('surroundings').setLevel(9)",
        "logging.getLogger('surroundings').setLevel(30)",
    ),
    Surrounding(
        "a disabled logger",
        "1.0 + (not logging.getLogger('surroundings').isEnabledFor(50))",
        "logging.disable(50)",
        "logging.disable(0)",
    ),
    Surrounding(
        "the environment",
        "float(os.environ.get('STATES_RATE', 1))",
        "os.environ['STATES_RATE'] = '2'",
        "del os.environ['STATES_RATE']",
    ),
    Surrounding(
        "a name in the environment",
        "1.0 + ('STATES_RATE' in os.environ)",
        "os.environ['STATES_RATE'] = '2'",
        "del os.environ['STATES_RATE']",
    ),
    Surrounding(
        "an imported environment",
        "float(getenv('STATES_RATE', '1'))",
        "os.environ['STATES_RATE'] = '2'",
        "del os.environ['STATES_RATE']",
        before="from os import getenv",
    ),
    Surrounding(
        "arguments of the program",
        "1.0 + ('--twice' in sys.argv)",
        "sys.argv.append('--twice')",
        "sys.argv.remove('--twice')",
    ),
    Surrounding(
        "a loaded module",
        "1.0 + ('states_loaded' in sys.modules)",
        "sys.modules['states_loaded'] = sys",
        "del sys.modules['states_loaded']",
    ),
    Surrounding(
        "a limit of Python",
        "1.0 + (sys.getrecursionlimit() == 3000)",
        "sys.setrecursionlimit(3000)",
        "sys.setrecursionlimit(1000)",
    ),
    Surrounding(
        "the folder",
        "1.0 + (os.getcwd() == '/')",
        "FOLDERS.append(os.getcwd())\n    os.chdir('/')",
        "os.chdir(FOLDERS.pop())",
        before="FOLDERS = []",
    ),
    Surrounding(
        "threads of Python",
        "1.0 + any(thread.name == 'states' for thread in threading.enumerate())",
        "END.clear()\n    threading.Thread(target=END.wait, args=(60,), name='states').start()",
        "END.set()",
        before="END = threading.Event()",
    ),
    Surrounding(
        "filters of warnings",
        "1.0 + any(kept[2] is UserWarning for kept in warnings.filters)",
        "warnings.simplefilter('ignore', UserWarning)",
        "warnings.filters.pop(0)",
    ),
)

READ_SETTINGS = """
def read():
    made = configparser.ConfigParser()
    made.read(FILE)
    return float(made['a']['r'])
"""
READ_JSON = """
def read():
    with open(FILE) as file:
        return json.load(file)
"""
SAVE = "np.save(FILE + '.npy', {0})"
WRITE = "pathlib.Path(FILE).write_text"
CONTENTS = tuple(
    Surrounding(
        name, read, f"{WRITE}({after!r})", f"{WRITE}({first!r})", f"{more}{WRITE}({first!r})"
    )
    for name, read, first, after, more in (
        ("a text in a file", "float(pathlib.Path(FILE).read_text())", "1.0", "2.0", ""),
        ("an open file", "float(open(FILE).read())", "1.0", "2.0", ""),
        (
            "lines of a file",
            "float(linecache.getline(FILE, 1) and os.path.getsize(FILE))",
            "1",
            "22",
            "",
        ),
        ("a size of a file", "float(os.stat(FILE).st_size)", "1", "22", ""),
        ("an array in a file", "float(np.loadtxt(FILE))", "1.0", "2.0", ""),
        ("bytes in a file", "float(np.fromfile(FILE, 'u1')[0]) - 48", "1", "2", ""),
        (
            "JSON in a file",
            "read()",
            "1.0",
            "2.0",
            READ_JSON,
        ),
        (
            "settings in a file",
            "read()",
            "[a]\nr=1.0",
            "[a]\nr=2.0",
            READ_SETTINGS,
        ),
    )
)
FILES = (
    *CONTENTS,
    Surrounding(
        "a file of an array",
        "float(np.load(FILE + '.npy'))",
        SAVE.format(2.0),
        SAVE.format(1.0),
        SAVE.format(1.0),
    ),
    Surrounding(
        "a file that is there",
        "1.0 + os.path.exists(FILE + '.new')",
        "pathlib.Path(FILE + '.new').write_text('')",
        "os.remove(FILE + '.new')",
    ),
    Surrounding(
        "a path that is there",
        "1.0 + pathlib.Path(FILE + '.new').exists()",
        "pathlib.Path(FILE + '.new').write_text('')",
        "os.remove(FILE + '.new')",
    ),
    Surrounding(
        "files that match",
        "1.0 + len(glob.glob(FILE + '.new*'))",
        "pathlib.Path(FILE + '.new').write_text('')",
        "os.remove(FILE + '.new')",
    ),
)

# They wait until a moment has come, so they take the seconds that the first steps have.
WAIT = "while not {0}:\n        time.sleep(0.02)"
CLOCKS = tuple(
    Surrounding(name, f"1.0 + ({late})", WAIT.format(late), before=before)
    for name, late, before in (
        ("a clock", "time.time() > END", "END = time.time() + SECONDS"),
        (
            "an imported clock",
            "t() > END",
            "from time import time as t\nEND = t() + SECONDS",
        ),
        (
            "a clock in a module",
            "CLOCKS['clock'].monotonic() > END",
            "CLOCKS = {'clock': time}\nEND = time.monotonic() + SECONDS",
        ),
        (
            "a date",
            "datetime.datetime.now() > END",
            "END = datetime.datetime.now() + datetime.timedelta(seconds=SECONDS)",
        ),
        (
            "a local time",
            "time.mktime(time.localtime()) > END",
            "END = time.mktime(time.localtime()) + 1.0",
        ),
    )
)

TRIED_OWNER = """
def tried(owner):
    try:
        return owner.power
    except AttributeError:
        return 1.0
"""
TRIED_GLOBAL = """
def tried():
    try:
        return POWER
    except NameError:
        return 1.0
"""
ABSENT = (
    Surrounding(
        "an attribute that is not there",
        "getattr(self, 'power', 1.0)",
        "self.power = 2.0",
        of_self=True,
    ),
    Surrounding(
        "an attribute that is asked for",
        "1.0 + hasattr(self, 'power')",
        "self.power = 2.0",
        of_self=True,
    ),
    Surrounding(
        "a key of the attributes", "1.0 + ('power' in vars(self))", "self.power = 2.0", of_self=True
    ),
    Surrounding(
        "a key of __dict__", "self.__dict__.get('power', 1.0)", "self.power = 2.0", of_self=True
    ),
    Surrounding(
        "an attribute that is tried",
        "tried(self)",
        "self.power = 2.0",
        before=TRIED_OWNER,
        of_self=True,
    ),
    Surrounding(
        "an attribute of the class, later",
        "getattr(self, 'power', 1.0)",
        "type(self).power = 2.0",
        of_self=True,
    ),
    Surrounding(
        "an attribute of the class alone",
        "getattr(type(self), 'power', 1.0)",
        "type(self).power = 2.0",
        of_self=True,
    ),
    Surrounding(
        "an attribute of a mixin",
        "self.power",
        "Held.power = 2.0",
        before="class Mixin:\n    power = 1.0",
        of_self=True,
    ),
    Surrounding(
        "an attribute by a computed name",
        "getattr(self, '_'.join(['po', 'wer']), 1.0)",
        "self.po_wer = 2.0",
        of_self=True,
    ),
    Surrounding(
        "a global that is not there", "globals().get('POWER', 1.0)", "globals()['POWER'] = 2.0"
    ),
    Surrounding(
        "a global that is tried",
        "tried()",
        "globals()['POWER'] = 2.0",
        before=TRIED_GLOBAL,
    ),
    Surrounding("a global that hides Python's", "abs(-1.0)", "globals()['abs'] = lambda x: 2.0"),
    Surrounding(
        "a module's variable, later",
        "getattr(sys.modules[__name__], 'POWER', 1.0)",
        "globals()['POWER'] = 2.0",
    ),
    Surrounding(
        "a name of Python's",
        "1.0 + hasattr(builtins, 'states_power')",
        "builtins.states_power = 1",
        "del builtins.states_power",
    ),
    Surrounding(
        "a function of math",
        "math.sqrt(1.0)",
        "math.sqrt = lambda x: 2.0",
        "math.sqrt = KEPT",
        before="KEPT = math.sqrt",
    ),
    Surrounding(
        "subclasses of a class",
        "float(len(Part.__subclasses__())) + 1.0",
        "KEPT.append(type('More', (Part,), {}))",
        before="KEPT = []\nclass Part:\n    pass",
    ),
    Surrounding(
        "a registered class",
        "1.0 + issubclass(int, Part)",
        "Part.register(int)",
        before="class Part(abc.ABC):\n    pass",
    ),
    Surrounding(
        "a dispatched function",
        "part(1)",
        "part.register(int, lambda x: 2.0)",
        before="@functools.singledispatch\ndef part(x):\n    return 1.0",
    ),
    Surrounding(
        "count of references",
        "1.0 + (sys.getrefcount(PART) > 9)",
        "KEPT.extend([PART] * 20)",
        before="PART, KEPT = object(), []",
    ),
)

SURROUNDINGS = (*SETTINGS, *FILES, *CLOCKS, *ABSENT)
