from kinetic_arch_toy.architecture import Toy

from kinetic_core.conformance import ArchitectureConformance


class TestToy(ArchitectureConformance):
    target = Toy
    name = "toy"
