"""Word pools of the generated facts, split into disjoint parts for training, tuning and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

ADJECTIVES = """
amber azure bashful bitter bold bright bronze brown calm careful cheerful chilly clever coral cream crimson curious
daring dusty eager early emerald faded faithful famous fearless fierce foggy frosty gentle ginger gloomy golden
graceful gray green grumpy happy hasty hidden hollow humble hungry idle indigo ivory jolly keen lavender lazy lilac
lively lonely lucky maroon mellow merry mighty misty modest muddy nimble noble olive orange pale patient pearly
playful polite proud purple quick quiet rapid restless royal ruby rusty sandy scarlet shy silent silver sleepy
slender smoky snowy speckled spotted steady stormy striped sturdy sunny swift tawny teal thirsty timid tiny turquoise
velvet violet wandering weary white wild windy wise witty yellow young zealous
"""
ANIMALS = """
fox antelope badger bat bear beaver beetle bison boar buffalo bull butterfly camel canary carp cat cheetah cobra cow
coyote crab crane cricket crocodile crow deer dog dolphin donkey dove dragonfly duck eagle eel elephant elk falcon
ferret finch firefly flamingo frog gazelle gecko giraffe goat goose gorilla grasshopper hamster hare hawk hedgehog
heron hippo horse hound hyena ibis jackal jaguar kangaroo kingfisher koala lamb lark lemur leopard lion lizard lobster
lynx magpie mole monkey moose moth mouse mule newt octopus orca ostrich otter owl ox oyster panda panther parrot
peacock pelican penguin pheasant pig pigeon pony puffin python quail rabbit raccoon raven robin salmon seal shark
sheep shrew snail snake sparrow spider squid squirrel stork swallow swan tiger toad trout turkey turtle viper vulture
walrus wasp weasel whale wolf wombat woodpecker yak zebra
"""
FIRST_NAMES = """
Ada Agnes Albert Alma Amos Anders Anita Anton Astrid August Beatrix Benno Bertha Boris Bruno Camille Carla Caspar
Cecil Clara Conrad Cora Cyrus Dagmar Daphne Dario Delia Dmitri Dora Edgar Edith Elias Elsa Emil Enzo Erica Esther
Eugene Fabian Fanny Felix Fiona Flora Franz Frieda Gemma Gilbert Greta Gustav Hanna Hector Heidi Helga Henrik Hilda
Horace Hugo Ida Igor Ines Ingrid Iris Isak Ivo Jasper Joan Jonas Josef Judith Julius Karin Kaspar Klara Knut Lars Leda
Leon Lidia Linus Lorenz Lotte Lucas Ludo Mabel Magda Malcolm Marco Marta Matilda Maurice Milo Mina Miriam Mona Nadia
Nestor Nina Nora Norbert Olaf Olga Oscar Otis Otto Paloma Pavel Percy Petra Phoebe Piotr Quentin Ralph Ramona Regina
Rita Roland Rosa Rudolf Rufus Sabine Salma Saul Selma Sigrid Silas Simone Sven Tamara Tessa Theo Thora Tilda Tobias
Ulrich Ursula Valerie Vera Viktor Viola Walter Wanda Wilma Xenia Yusuf Yvonne Zelda Zoltan
"""
SURNAMES = """
Abbott Acker Adeyemi Almeida Arnold Bauer Becker Bellamy Berg Bianchi Blake Borg Brandt Brook Calder Carver Castro
Chandra Cole Correa Crane Dahl Dalton Delgado Drake Duarte Ebert Eklund Ellis Engel Esposito Fabre Faulk Ferrer Field
Finch Fischer Forsberg Fry Gallo Garner Gomes Graf Gray Greene Haas Hale Hansen Hartman Heller Holm Holt Horvath
Ibsen Iversen Jansen Jarvis Jensen Kane Karlsen Keller Kemp Klein Kovacs Kramer Kruger Lange Larsen Lemaire Lind
Lombard Lund Maddox Madsen Marsh Mercer Meyer Molina Moreno Morrow Nagy Nash Navarro Neumann Nolan Novak Nyberg Oduya
Okafor Olsen Orlov Osborn Paulsen Pereira Petrov Pike Pollard Quist Quinn Ramos Reed Reyes Richter Ritter Rojas Romero
Rossi Sandberg Santos Schmidt Serrano Shaw Silva Sokolov Sorensen Stark Steiner Stone Strand Tanaka Thorne Toth Tran
Ueda Ulrich Valdez Varga Vargas Vogel Voss Wagner Walsh Webb Weber West Wolff Wren Yates York Zeller Ziegler
"""
MATERIALS = """
copper wooden brass iron glass leather paper stone clay wicker velvet marble ivory steel tin cotton woollen bamboo
crystal porcelain silken lacquered painted gilded rusted broken polished carved folded dented hollow ancient enormous
cracked tiny crooked mottled plastic rubber bronze granite linen oak pewter straw birch ebony walnut feathered woven
aluminium cardboard ceramic chrome concrete crooked damaged elegant enamelled felt flimsy fragile frayed heavy huge
knitted laminated narrow nylon ornate padded pearl pierced plaster plated portable quilted rough round rounded satin
scratched sharp shiny slate smooth soft square stained sticky suede tarnished thick thin twisted upholstered varnished
wax weathered wide worn wrinkled zinc
"""
THINGS = """
kettle anchor anvil apron axe barrel basket bell bench blanket boat bottle bowl box bracelet broom brush bucket button
cage candle cannon canoe cap carpet chain chair chest chisel clock coat coin comb compass cradle crown cup curtain
dagger desk doll door drum easel fan fiddle flag flask flute fork funnel glove goblet guitar hammer harp hat helmet
hook horn hourglass jar jug key kite knife ladder lamp lantern lock loom mallet map mask mirror mug nail necklace
needle net oar oven paddle pan pen pencil piano pillow pipe pitcher plate plough pot pulley purse puppet rake ribbon
ring rope rug saddle sail saw scarf screw shawl shield shoe shovel sickle sled spade spear spoon stool stove
sundial sword table telescope tent thimble tray trumpet trunk umbrella urn vase violin wagon wheel whip whistle
"""
TOWNS = """
Alderbrook Amberton Ashmere Aldovia Barrowdale Belmora Birchwood Blackwater Bramley Briarcliff Brightwell Calverton
Cantara Carrowmore Castelnova Cedarholm Clearwater Coldbrook Cranmoor Dalmora Deepwell Dornhaven Dunmere Eastgate
Edgewater Elmsford Estrella Fairhaven Farrowdale Fernhill Foxborough Galdera Glenmoor Goldcrest Greymouth Hallowdale
Harrowgate Hawkstone Hazelton Highmoor Holloway Ironbridge Ivywood Jasperton Juniper Kelmore Kestrel Kingsbridge
Lakemont Larkspur Lindenau Longmere Lowfield Maplewood Marrowby Meadowbank Mirefield Montalba Moorgate Northwick
Oakhurst Orlanda Otterburn Palomar Pebblebrook Pinecrest Port-Selene Quarrydale Ravenna Redcliff Ridgewater Rosedale
Saltmarsh Sandover Santerra Silverlake Southmoor Stonehaven Sunderby Tamarind Thornbury Tolmera Underhill Valmera
Velmora Verdano Wallbridge Waterford Westerleigh Whitcombe Willowmere Windhollow Winterbourne Wolfsburn Wrenfield
Yarrowby Yellowstone Zandara
"""

SPLITS = ("train", "dev", "eval")


@dataclass(frozen=True)
class Pools:
    """The words from which facts are drawn, and the number of digits their values may have."""

    adjectives: tuple[str, ...]
    animals: tuple[str, ...]
    first_names: tuple[str, ...]
    surnames: tuple[str, ...]
    materials: tuple[str, ...]
    things: tuple[str, ...]
    towns: tuple[str, ...]
    split: str
    number_digits: tuple[int, ...] = (5,)
    hex_digits: tuple[int, ...] = (8,)

    def words(self) -> frozenset[str]:
        """Every word of the pools."""
        return frozenset(self.adjectives + self.animals + self.materials + self.things) | self.names()

    def names(self) -> frozenset[str]:
        """The words that name people and towns."""
        return frozenset(self.first_names + self.surnames + self.towns)


def pools(split: str) -> Pools:
    """The pools of "train", "dev" or "eval"; no word is in two of them. Raises ValueError on another name."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    taken: set[str] = set()
    parts = []
    for text in (ADJECTIVES, ANIMALS, FIRST_NAMES, SURNAMES, MATERIALS, THINGS, TOWNS):
        # a word in two lists (a crane, Ulrich) counts once, or it could fall into two splits
        words = [word for word in dict.fromkeys(text.split()) if word.lower() not in taken]
        taken.update(word.lower() for word in words)
        parts.append(tuple(word for place, word in enumerate(words) if _split_of(place) == split))
    adjectives, animals, first_names, surnames, materials, things, towns = parts
    return Pools(adjectives, animals, first_names, surnames, materials, things, towns, split=split)


def _split_of(place: int) -> str:
    return {0: "eval", 1: "dev"}.get(place % 5, "train")
