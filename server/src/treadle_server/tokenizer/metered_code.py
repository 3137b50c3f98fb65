"""Compiles templates so that their environment is asked before anything that costs."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame


class MeteredCode(CodeGenerator):
    """Jinja's code generator, less the places where it computes without its environment."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        """Look at the clock in every pass."""
        tick = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None))
        node.body.insert(0, tick.set_lineno(node.lineno).set_environment(self.environment))
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Join with `environment.join_values`."""
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Weigh what is compared: lists are compared element by element."""
        self.write("(environment.weighed(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        """Weigh the right side."""
        operators = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in"}
        self.write(f" {operators.get(node.op, 'not in')} environment.weighed(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Weigh the keys of a mapping, which are hashed."""
        self.write("{")
        for pair in node.items:
            self.write("environment.weighed(")
            self.visit(pair.key, frame)
            self.write("): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Take slices with `environment.cut`."""
        self.write("environment.cut(" if isinstance(node.arg, nodes.Slice) else "environment.getitem(")
        self.visit(node.node, frame)
        self.write(", ")
        self.visit(node.arg, frame)
        self.write(")")

    def visit_Slice(self, node: nodes.Slice, frame: Frame) -> None:  # noqa: N802
        """Write a slice as an argument."""
        self.write("slice(")
        for bound in (node.start, node.stop, node.step):
            self.visit(bound or nodes.Const(None), frame)
            self.write(", ")
        self.write(")")
