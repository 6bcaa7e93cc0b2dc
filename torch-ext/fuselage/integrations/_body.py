"""What is fused in one body of a forward that `_fusion.py` rewrites: see there."""

from __future__ import annotations

import ast
from copy import deepcopy
from functools import partial
from typing import Optional

from . import _patterns, _source
from ._norms import LAYER_NORM
from ._statements import Statements, name_node

RMS_NORM = "rms_norm ("  # what replaced a norm
PREFIX = "fuselage"  # of names in the forward
_GELU = "gelu_tanh in a product"
_PARTS = "products of parts"
_GATE = "addcmul (gate and residual)"  # what the report says where there is nothing else


class Body(Statements):
    """The statements of one body of a forward, and what is fused in them.

    Args:
        fusion: Of the whole forward (`_fusion.py`).
    """

    def __init__(self, fusion, statements: list[ast.stmt]):
        super().__init__(statements, fusion.reads, fusion.self_name)
        self.fusion = fusion

    def fuse_norms(self) -> None:
        """Modulations first: the norms in them are not norms by themselves."""
        for k in range(len(self.statements)):
            self._fuse_modulations_of(k)
            self._fuse_method(k)
        for modulated in (True, False):
            for j, statement in enumerate(self.statements):
                if self.slots[j] and _source.is_simple(statement):
                    self._norms_of(j, modulated)

    def fuse_products(self) -> None:
        for j, statement in enumerate(self.statements):
            if _source.is_simple(statement):
                # NOTE: anew after each: other expressions may have gone with the one.
                while any(map(partial(self._fuse_product, j), _source.evaluated_once(statement))):
                    pass

    def fuse_gates(self) -> None:
        for j in range(len(self.slots)):
            self._gate_of(j)

    def _norms_of(self, j: int, modulated: bool) -> None:
        seen: set[int] = set()  # parts of what is fused
        for node in list(_source.evaluated_once(self.statements[j])):
            site = None if id(node) in seen else self._normed(node, j)
            if site is not None and site.is_modulated == modulated:
                seen |= {id(n) for n in ast.walk(node)} - {id(n) for n in ast.walk(site.x)}
                if not self._fuse_with_sum(site, j) and modulated:
                    self._fuse_alone(site, j)

    def _fuse_modulations_of(self, k: int) -> None:
        """Where a norm is modulated more than once, and read by nothing else."""
        found, call = _source.assigned(self.statements[k]), self._norm_set_by(k)
        if call is None or not self.fusion.is_modulated_alone(found[0]):
            return
        (name, _), (norm, x) = found, call
        if _patterns.floated(x)[1] or not self.fusion.modulates(norm.attr):
            return
        sites: dict[int, tuple[int, _patterns.Normed]] = {}
        for j in range(k + 1, len(self.statements)):
            if _source.is_simple(self.statements[j]):
                for node in _source.evaluated_once(self.statements[j]):
                    normed, scale, shift = _patterns.modulation_of(node)
                    if scale is not None and getattr(normed, "id", None) == name:
                        # The outermost comes first.
                        sites.setdefault(
                            id(normed), (j, _patterns.Normed(node, norm, normed, scale, shift))
                        )
        if len(sites) != self.fusion.reads[name]:
            return
        # The norm's input gets its name: it may have another meaning by then, but no other value.
        if any(_source.mutates(s) & _source.loads(x) for s in self.statements[k + 1 :]):
            return
        named = ast.Assign([name_node(name, ast.Store())], x)
        self.rewrite(k, ast.copy_location(named, self.statements[k]))
        for j, site in sites.values():
            self._fuse_alone(site, j)

    def _fuse_method(self, j: int) -> None:
        """`m, .. = self.method(n, ..)`, which modulates the norm n; with the sum before it, if
        there is one: then it gives that, too.
        """
        statement = self.statements[j]
        value = statement.value if isinstance(statement, ast.Assign) else None
        function = value.func if isinstance(value, ast.Call) and value.args else None
        owner = getattr(getattr(function, "value", None), "id", None)
        if not isinstance(function, ast.Attribute) or owner != self.fusion.self_name:
            return
        k = self.only_definition(getattr(value.args[0], "id", ""), j)
        call = None if k is None else self._norm_set_by(k)
        if call is None or not self.fusion.modulates(call[0].attr):
            return
        (norm, x), more = call, self.fusion.modulating(function.attr)
        if more is None or not self.may_move(x, range(k + 1, j)):
            return
        total = self._sum_that_waits(x, k, j) if more else None
        target = statement.targets[0]
        if total is not None and isinstance(target, ast.Tuple):
            made = self._call("gated_modulation", norm, *self._parts_of(total))
            both = ast.Tuple([target.elts[0], name_node(x.id, ast.Store())], ast.Store())
            target = ast.Tuple([both, *target.elts[1:]], ast.Store())
            self.rewrite(self.last_change(x.id, k))
            self.fusion.calls("gate_residual_ada_norm")
        else:
            made = self._call("modulation", norm, x)
            self.fusion.calls(self.fusion.modulated_form(norm.attr))
        value = self._call(function.attr, name_node(owner), made, *value.args[1:])
        value.keywords = statement.value.keywords
        self.rewrite(k)
        self.rewrite(j, ast.copy_location(ast.Assign([target], value), statement))

    def _sum_that_waits(self, x: ast.expr, k: int, j: int) -> Optional[_patterns.Sum]:
        """What `x`, the input of the norm in statement k, is set to, if that can be done at j."""
        i = self.last_change(x.id, k) if isinstance(x, ast.Name) else None
        total = None if i is None else self._sum_set_by(i, x.id)
        if total is None or total.wide:
            return None
        read = {x.id} | total.reads
        others = [m for m in range(i + 1, j) if m != k]
        if any(read & self.changes[m] or x.id in self.reads[m] for m in others):
            return None
        calls = [n for part in total.terms for n in ast.walk(part) if isinstance(n, ast.Call)]
        calls_self = any(self.calls_self(call) for call in calls)
        return None if calls_self or x.id in self.reads[j] else total

    def _normed(self, node: ast.expr, j: int) -> Optional[_patterns.Normed]:
        value, like = _patterns.cast_of(node)
        normed, scale, shift = _patterns.modulation_of(value)
        k = None
        call = self.fusion.norm_call(normed)
        if call is None and isinstance(normed, ast.Name) and normed is not node:
            k = self.only_definition(normed.id, j)
            call = None if k is None else self._norm_set_by(k)
        if call is None:
            return None
        norm, x = call
        inner, floated = _patterns.floated(x)
        cast = floated and like is not None and _source.same(inner, like)
        if cast:
            x = inner
        elif like is not None or (floated and scale is not None):
            return None  # it is another dtype's
        site = _patterns.Normed(node, norm, x, scale, shift, cast, k)
        if site.is_modulated and not self.fusion.modulates(site.name):
            return None
        if k is None:
            return site
        return site if self.may_move(x, range(k + 1, j)) else None

    def _norm_set_by(self, k: int) -> Optional[tuple[ast.expr, ast.expr]]:
        found = _source.assigned(self.statements[k])
        return None if found is None else self.fusion.norm_call(found[1])

    # -- sums --

    def _sum_of(self, node: ast.expr, i: int) -> Optional[_patterns.Sum]:
        """What statement i adds up in `node`."""
        value, like = _patterns.cast_of(node)
        pair = _patterns.binary(value, ast.Add)
        if pair is None or any(isinstance(side, ast.Constant) for side in pair):
            return None
        for residual, x in (pair, pair[::-1]):
            product, before = self._product(x, i)
            if product is None:
                continue
            if like is None:
                return _patterns.Sum(pair, residual, product, before=before)
            residual, floated = _patterns.floated(residual)
            if floated and _source.same(residual, like):
                return _patterns.Sum(
                    pair, residual, tuple(_patterns.floated(f)[0] for f in product), True, before
                )
        if like is not None:
            return None
        return _patterns.Sum(pair, pair[0], pair[1:], normed=self._normed_term(pair, i))

    def _normed_term(self, pair: tuple, i: int) -> Optional[_patterns.NormedTerm]:
        """The term of a sum in statement i that is an RMS norm, of this statement or another."""
        for residual, term in (pair, pair[::-1]):
            before, call = None, self.fusion.norm_call(term)
            if call is None and isinstance(term, ast.Name):
                before = self.only_definition(term.id, i)
                call = None if before is None else self._norm_set_by(before)
            if call is None or not self.fusion.norms[call[0].attr].startswith(RMS_NORM):
                continue
            if before is None or self.may_move(call[1], range(before + 1, i)):
                what = self.fusion.norms[call[0].attr]
                return _patterns.NormedTerm(*call, residual, what, before)
        return None

    def _product(self, x: ast.expr, i: int) -> tuple[Optional[tuple], Optional[int]]:
        """The factors of `x`, and the statement that multiplies them, if that is not i."""
        x, before = self.inlined(x, i)
        if x is None:
            return None, None
        pair = _patterns.binary(x, ast.Mult)
        if pair is None or any(isinstance(side, ast.Constant) for side in pair):
            return None, None
        # A modulation, of a norm that is none of ours, has no gate.
        return (None, None) if _patterns.scaled(x) is not None else (pair, before)

    def _fuse_with_sum(self, site: _patterns.Normed, j: int) -> bool:
        if _patterns.binary(site.x, ast.Add) is not None:
            return self._fuse_inside(site, j)
        if not isinstance(site.x, ast.Name):
            return False
        name, start = site.x.id, j if site.before is None else site.before
        i = self.last_change(name, start)
        if i is not None and isinstance(self.statements[i], ast.If):
            return self._fuse_with_either(site, i, start, j)
        total = None if i is None else self._sum_set_by(i, name)
        if total is None or not self._norm_may_move(site, i, start, j):
            return False
        call = self._call_of_both(site, total)
        if call is None:
            return False
        self.rewrite(i, self._both(name, call, self.statements[i]))
        self._take(site, j)
        return True

    def _fuse_with_either(self, site: _patterns.Normed, m: int, norm: int, j: int) -> bool:
        """With `h = a + b`, and then `if ..: h = c + d`: in the branch, or else with the first."""
        name, condition = site.x.id, self.statements[m]
        inner = self.fusion.bodies.get(id(condition.body))
        i = self.last_change(name, m)
        q = None if inner is None else inner.last_change(name, len(inner.statements))
        if condition.orelse or i is None or q is None or self.slots[m] != [condition]:
            return False
        first, second = self._sum_set_by(i, name), inner._sum_set_by(q, name)
        if first is None or second is None or first.wide or second.wide:
            return False
        first.normed = second.normed = None  # these stay where they are
        if not inner._norm_may_move(site, q, *[len(inner.statements)] * 2):
            return False
        between = range(i + 1, m)
        waits = self.unchanged(first.reads, between) and name not in _source.loads(condition.test)
        if not waits or any(name in self.reads[k] for k in between):
            return False
        if not self._norm_may_move(site, m, norm, j) or not self._norm_may_move(site, i, m, m):
            return False
        calls = [self._call_of_both(site, first), inner._call_of_both(site, second)]
        if None in calls:
            return False
        alone = self.statements[i]
        if first.is_gated and self.fusion.modulated:
            gated = ast.copy_location(self._call("gated", first.residual, *first.factors), alone)
            alone = ast.copy_location(ast.Assign(alone.targets, gated), alone)
        inner.rewrite(q, self._both(name, calls[1], inner.statements[q]))
        inner.slots[0].insert(0, alone)
        condition.orelse = [self._both(name, deepcopy(calls[0]), self.statements[i])]
        self.rewrite(i)
        self._take(site, j)
        return True

    def _sum_set_by(self, i: int, name: str) -> Optional[_patterns.Sum]:
        """Of the statement `name = sum`, if it is still that."""
        found = _source.assigned(self.statements[i])
        if found is None or found[0] != name or self.slots[i] != [self.statements[i]]:
            return None
        return self._sum_of(found[1], i)

    def _norm_may_move(self, site: _patterns.Normed, i: int, norm: int, j: int) -> bool:
        """Up from statement `norm`, and its modulation from j, to statement i, the sum's."""
        modulation = [part for part in (site.scale, site.shift) if part is not None]
        return self.unchanged({site.x.id}, range(i + 1, norm)) and all(
            self.may_move(part, range(i, j)) for part in modulation
        )

    def _both(self, name: str, call: ast.expr, where: ast.stmt) -> ast.stmt:
        """`normed, name = call`"""
        names = [
            name_node(f"{PREFIX}_normed_{self.fusion.fresh}", ast.Store()),
            name_node(name, ast.Store()),
        ]
        assign = ast.Assign([ast.Tuple(names, ast.Store())], call)
        return ast.fix_missing_locations(ast.copy_location(assign, where))

    def _take(self, site: _patterns.Normed, j: int) -> None:
        """What `_both` has set, in the place of the norm."""
        self._put(site, j, name_node(f"{PREFIX}_normed_{self.fusion.fresh}"))
        self.fusion.fresh += 1

    def _call_of_both(self, site: _patterns.Normed, total: _patterns.Sum) -> Optional[ast.expr]:
        layer = self.fusion.norms[site.name] == LAYER_NORM
        if not site.is_modulated and not (layer and total.is_gated):
            # The norm rounds as it does; a product is computed before it.
            if total.wide:
                return None
            if total.normed is not None and self.fusion.norms[site.name] == total.normed.what:
                return self._norm_add_norm(site, total.normed)
            self.fusion.whats.add("fused_add_layer_norm" if layer else "fused_add_rms_norm")
            return self._call("add_norm", site.norm, *total.terms)
        self.fusion.calls("gate_residual_ada_norm")
        flags = (ast.Constant(site.cast), ast.Constant(total.wide))
        parts = (*self._parts_of(total), site.scale, site.shift)
        return self._call("gated_norm", site.norm, *parts, *flags)

    def _norm_add_norm(self, site: _patterns.Normed, normed: _patterns.NormedTerm) -> ast.expr:
        if normed.before is not None:
            self.rewrite(normed.before)
        self.fusion.whats.add("rms_norm_add_rms_norm")
        return self._call("norm_add_norm", normed.norm, normed.x, normed.residual, site.norm)

    def _parts_of(self, total: _patterns.Sum) -> tuple[Optional[ast.expr], ...]:
        """The residual, x and the gate or None; a statement of the product alone is dropped."""
        if total.before is not None:
            self.rewrite(total.before)
        return (total.residual, *total.factors, *[None] * (2 - len(total.factors)))

    def _fuse_inside(self, site: _patterns.Normed, j: int) -> bool:
        """Where the sum is an argument of the norm, and nothing else."""
        total = self._sum_of(site.x, j)
        call = None if total is None else self._call_of_both(site, total)
        if call is None:
            return False
        self._put(site, j, ast.Subscript(call, ast.Constant(0), ast.Load()))
        return True

    def _fuse_alone(self, site: _patterns.Normed, j: int) -> None:
        if site.scale is not None:
            self.fusion.calls(self.fusion.modulated_form(site.name))
        parts = (site.scale, site.shift, ast.Constant(site.cast))
        call = self._call("modulated", site.norm, site.x, *parts)
        self._put(site, j, call)

    def _put(self, site: _patterns.Normed, j: int, new: ast.expr) -> None:
        self.replace(site.node, j, new, site.before)

    # -- what is next to linear layers --

    def _fuse_product(self, j: int, node: ast.expr) -> bool:
        children = self.fusion.children
        for names, fused in ((children.gelus, self._gelu_of), (children.wide, self._linear_of)):
            call = self.fusion.call_of(node, names)
            x, before = (None, None) if call is None else self.inlined(call[1], j)
            made = None if x is None else fused(call[0], x)
            if made is not None:
                self.replace(node, j, made, before)
                return True
        return False

    def _gelu_of(self, gelu: ast.expr, x: ast.expr) -> Optional[ast.expr]:
        call = self.fusion.call_of(x, self.fusion.children.linears)
        if call is None:
            return None
        self.fusion.whats.add(_GELU)
        return self._call("gelu_of", gelu, *call)

    def _linear_of(self, linear: ast.expr, x: ast.expr) -> Optional[ast.expr]:
        found = _patterns.concatenation(x)
        if found is None:
            return None
        self.fusion.whats.add(_PARTS)
        parts, dim = found
        return self._call("linear_of", linear, ast.Tuple(parts, ast.Load()), dim)

    # -- what is left of gates --

    def _gate_of(self, j: int) -> None:
        statement = self.statements[j]
        if not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
            return
        if self.slots[j] != [statement] or _patterns.cast_of(statement.value)[1] is not None:
            return
        total = self._sum_of(statement.value, j)
        if total is not None and total.is_gated:
            call = self._call("gated", *self._parts_of(total))
            self.fusion.whats = self.fusion.whats or {_GATE}
            statement.value = ast.copy_location(call, statement.value)
            self.rewrite(j, statement)

    def _call(self, helper: str, *arguments: Optional[ast.expr]) -> ast.expr:
        given = [ast.Constant(None) if a is None else a for a in arguments]
        return ast.Call(name_node(f"{PREFIX}_{helper}"), given, [])
