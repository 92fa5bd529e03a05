"""Plain English words that are one token each in byte-level BPE vocabularies, at the start of a text and after a space.

A prompt of n of them is n tokens long without asking any tokenizer, and reads as text rather than as noise. Checked
against SmolLM2's vocabulary by ``tests/server/bench/serve/test_workload.py``; other vocabularies split a few of them, which
is why the bench calibrates against the server's own count.
"""

_TEXT = """
able about above accept action active actual address after again against age agree air allow almost alone along
already also although always among amount and animal annual another answer any apply area arm around art article
artist ask aspect attack attempt author avoid away baby back bad bag balance ball bank bar base basic basis bear beat
because bed before begin behavior benefit best better between big bill bird bit black block blood blow blue board boat
body bond bone book border born both bottom box boy brain branch break bridge brief bright broad brother brown budget
build building burn bus business but buy call camera camp can cancer card care case cash cast catch cause cell center
central century certain chair change chapter character charge check chemical chief child choice choose church circle
city civil claim class clean clear climate close club coast code cold collect college color column come comfort
command comment commit common community company compare complete complex computer concept condition conduct connect
consider constant contact content context continue contract control convert cook cool copy core correct cost could
count country course court cover create credit crime critical cross culture cup current curve customer cut cycle daily
dark data date daughter day dead deal death decision deep defense degree demand depend depth describe design detail
develop device die direct disease display distance district divide doctor document dog dollar door double down draft
draw dream drive drop drug dry due during dust duty each early earth east easy eat economic edge education effect egg
eight either election electric element else employ empty enable end energy engine enough enter entry equal escape even
event ever every evidence exact example except exchange exercise exist expand expect expert extend extra eye face fact
factor fail fair faith fall family famous far farm fashion fast fat father feature feed feel female few field fight
figure file fill film final find fine finger finish fire firm first fish fit five fix flat flight floor flow flower
fly focus follow food foot force foreign forest forget form formal former forward found four frame free freedom fresh
friend from front fruit fuel full function fund future gain game gas gate gather general get girl give glass global go
goal god gold good govern grade grand grant graph grass great green ground group grow growth guard guess guide gun
hair half hall hand handle hang happy hard hat head health heart heat heavy height help here hero high hill history
hit hold hole home horse hospital host hot hour house how human hundred ice idea ideal image impact import include
income index industry inform initial inside instance instead intend interest internal into invest iron issue item join
joint journal jump just keep key kid kill kind king know label lake land language large last late launch law lay lead
leader leaf league learn least leave left leg legal let letter level library lie life lift light like limit line link
lip list listen little live load loan local lock long look loss lot love low machine mail main major make male man
manage many map mark market marriage mass master match material matter may maybe meal mean measure meat media medical
member memory mental menu message metal method middle might mile military milk million mind mine minor minute miss
mission mix model modern moment money month moon more most mother motion motor mount mouth move movie much music must
name nation native natural nature near neck need net network never new news next night nine nor normal north nose note
nothing now nuclear number object occur ocean odd off offer office often oil old once one only onto open option orange
order ordinary organ origin other ought outside over own owner pace pack page pain pair panel paper parent park part
party pass past path patient pattern pay peace peer pen people per percent perfect perform perhaps period person phase
phone photo phrase physical pick picture piece place plain plan plane planet plant plate play please plus point pole
policy pool poor popular port position positive possible post pot potential pound power practice prepare present press
pretty prevent price primary prime print prior private problem process product profit program progress project proof
property public pull purpose push put quality quarter question quick quiet quite race radio rail rain raise range rank
rare rate rather ratio reach read ready real reason recall receive recent record red reduce region regular relation
release remember remote remove repair repeat replace reply report request require research resource respond rest
result return review reward rich ride right ring rise risk river road rock role roll room root rough round route row
rule run safe salt same sample sand save say scale scene school science score screen sea search season seat second
secret section sector secure see seed seek select self sell send sense series service set seven several shape share
sharp she sheet shell shift ship shirt shop short shot should show shut side sight sign signal similar simple since
sing single sit site six size skill skin sky sleep slice slow small smart smooth snow social soft soil solid solution
solve some son song soon sort sound source south space special species speech speed spirit split spot spread spring
square stable staff stage stand standard star start state station status stay step stick still stock stone stop store
storm story stream street stress string strong structure student study stuff style subject submit success such sugar
suggest summer sun supply support surface survey sweet switch symbol system table take talk tall tank target task tax
teacher team tear tell ten term test text than thank that the theme then theory there these they thick thin thing
think third this those though thought three threat thus tie tight time tiny title today together tone too tool tooth
top topic total touch town track trade train transfer travel treat tree trial trip true trust truth try tube turn two
type under union unique unit until upon upper use usual value version very video view visit visual voice volume vote
wage wait walk wall want war warm warn wash waste watch water wave way weak wealth wear weather web week weight west
wheel when where which while white whole why wide wife wild will win wind window wine wing winner winter wire wise
with within without woman wood word work world worth would write wrong yard year yellow yes yet you young zone
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
