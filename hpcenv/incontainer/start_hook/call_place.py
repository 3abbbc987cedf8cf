"""Find the place of a call of an operation: module, line of the script, and phase of the step.

The place is read from Python's frames. In the forward pass, torch's autograd gives a number to each operation. In the
backward pass, this number leads to the place. No hook is put into modules, because backward hooks change the graph, and
torch.compile inspects forward hooks.
"""

import os
import sys
import weakref
from typing import Any, Dict, Optional, Tuple

_MOST_FRAMES = 400
_CallPlace = Tuple[str, str, str]


class CallPlaces:
    """Finds the place of the current operation."""

    def __init__(self, torch: Any, watch: Any) -> None:
        self._torch = torch
        self._watch = watch
        self._call = torch.nn.Module._call_impl.__code__
        self._torch_folder = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
        self._own_folder = os.path.dirname(os.path.abspath(__file__)) + os.sep
        self._of_forward = {}  # type: Dict[int, _CallPlace]
        self._names = {}  # type: Dict[int, Tuple[Any, Dict[int, str]]]
        self._phase = "setup"

    def begin(self) -> None:
        """Forget the forward pass of the last step."""
        self._of_forward.clear()

    def now(self) -> Dict[str, Any]:
        """Return phase, module, its class and the line, as far as they are known."""
        node = self._backward_node()
        module, at = self._look()
        place = (*self._name(module), at)
        phase = self._phase_of(node, inside=module is not None)
        if node is not None:
            place = self._of_forward.get(node._sequence_nr(), ("", "", at) if module is None else place)
        elif phase in ("setup", "forward", "gradients"):
            self._of_forward.setdefault(self._number() - 1, place)
        found = {"phase": phase}
        found.update({key: text for key, text in zip(("module", "class", "at"), place) if text})
        return found

    def _phase_of(self, node: Any, *, inside: bool) -> str:
        if self._watch.is_stepping():
            self._phase = "forward"
            return "optimizer"
        if node is not None or self._watch.is_in_backward():
            self._phase = "gradients"
            return "backward"
        if inside:
            self._phase = "forward"
        return self._phase

    def _backward_node(self) -> Any:
        current = getattr(self._torch._C, "_current_autograd_node", None)
        return None if current is None else current()

    def _number(self) -> int:
        get = getattr(self._torch.autograd, "_get_sequence_nr", None)
        return 0 if get is None else int(get())

    def _look(self) -> Tuple[Any, str]:
        """Return the outermost and the innermost torch module of the current call, and the innermost script line."""
        innermost, outermost, at = None, None, ""
        frame = sys._getframe(2)  # type: Any
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            if code is self._call:
                outermost = frame.f_locals.get("self")
                innermost = outermost if innermost is None else innermost
            elif not at and self._is_script(code.co_filename):
                at = "%s:%d" % (os.sep.join(code.co_filename.split(os.sep)[-2:])[-120:], frame.f_lineno)
            frame = frame.f_back
        return (None if innermost is None else (outermost, innermost)), at

    def _is_script(self, file: str) -> bool:
        return not file.startswith((self._torch_folder, self._own_folder, "<"))

    def _name(self, modules: Optional[Tuple[Any, Any]]) -> Tuple[str, str]:
        """Return the innermost module's name inside the outermost module, and the innermost module's class."""
        if modules is None:
            return "", ""
        root, module = modules
        kind = type(module).__name__[:80]
        name = self._names_in(root).get(id(module))
        if name is None:
            return "%s (not a part of it: %s)" % (type(root).__name__[:80], kind), kind
        return ".".join(filter(None, (type(root).__name__, name)))[:200], kind

    def _names_in(self, root: Any) -> Dict[int, str]:
        known = self._names.get(id(root))
        if known is None or known[0]() is not root:
            known = weakref.ref(root), {id(module): name for name, module in root.named_modules()}
            self._names[id(root)] = known
        return known[1]
