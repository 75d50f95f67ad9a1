"""The functions, tables and syntax that a query may use. Anything else is refused, including what later DuckDBs add.

A query may use what depends only on its text and its files, and changes nothing. DuckDB's own catalogue cannot tell: it
marks functions that read the clock as stable, like those that extract the hour of a time.
"""

from collections.abc import Iterator

from hostdev.core.errors import UserError
from hostdev.core.printable import printable
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.statement import SELECTS, Node, Statement, table_name, walk


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CHANGING = {
    "random": "draw(id, 2020), which maps a value and a seed to a number in [0, 1)",
    **dict.fromkeys(("uuid", "gen_random_uuid", "uuidv4", "uuidv7"), "md5(id)"),
    **dict.fromkeys(
        (
            *("now", "today", "current_date", "current_timestamp", "current_localtimestamp", "get_current_timestamp"),
            *("transaction_timestamp", "get_current_time", "current_localtime", "current_time", "localtimestamp"),
            *("localtime", "ago"),
        ),
        "a fixed time, such as TIMESTAMP '2026-01-31 12:00:00'",
    ),
    **dict.fromkeys(("nextval", "currval"), "row_number()"),
    **dict.fromkeys(("setseed", "getenv", "current_setting", "getvariable"), "the value as a constant"),
}
"""Functions whose value changes between runs, and what to write instead."""

# Clock functions that are called without parentheses, so that they look like columns.
_CLOCKS = frozenset(("current_date", "current_timestamp", "current_time", "localtimestamp"))

PICKING = _words(
    """
    any_value arbitrary arg_max arg_max_null arg_max_nulls_last arg_min arg_min_null arg_min_nulls_last argmax argmin
    array_agg first group_concat json_group_array json_group_object json_group_structure last list listagg lttb max_by
    min_by string_agg variant_group_array variant_group_object
    """
)
"""Aggregates whose value depends on the order of all rows, including rows that tie in the aggregate's ORDER BY."""

SUMMING = _words(
    """
    avg corr covar_pop covar_samp entropy favg fsum geomean geometric_mean kahan_sum kurtosis kurtosis_pop mean product
    regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy sem skewness stddev
    stddev_pop stddev_samp sum sumkahan var_pop var_samp variance wavg weighted_avg
    """
)
"""Aggregates whose value depends on the order in which floating-point numbers are added."""

APPROXIMATE = frozenset(("approx_quantile", "reservoir_quantile", "approx_top_k"))
"""Aggregates whose value depends on how rows are divided among threads."""

_EXACT = _words(
    """
    approx_count_distinct bit_and bit_or bit_xor bitstring_agg bool_and bool_or count count_if count_star countif
    histogram histogram_exact mad max median min mode quantile quantile_cont quantile_disc
    """
)  # their value does not depend on the order of rows, or `settle` defines this order

AGGREGATES = _EXACT | PICKING | SUMMING | APPROXIMATE
"""All aggregates that a query may use."""

_WINDOWS = _words(
    """
    cume_dist dense_rank fill first_value lag last_value lead nth_value ntile percent_rank rank rank_dense row_number
    """
)

WINDOWS = frozenset(["last_items"])
"""Window functions that hostdev adds to DuckDB."""

_OPERATORS = _words(
    """
    != !__postfix !~~ !~~* % & && * ** + - ->> / // < <-> << <= <=> <@ = > >= >> @ @> ^ ^@ | || ~ ~~ ~~* ~~~
    """
) | {"is distinct from", "is not distinct from"}

_TIMES = _words(
    """
    age century date_diff date_part date_sub date_trunc datediff datepart datesub datetrunc day dayname dayofmonth
    dayofweek dayofyear decade era hour isodow isoyear julian last_day make_timestamptz microsecond millennium
    millisecond minute month monthname quarter second strftime time_bucket timezone timezone_hour timezone_minute
    week weekday weekofyear year yearweek
    """
)  # some depend on the time zone, which is UTC

_SCALARS = _words(
    """
    abs acos acosh add aggregate alias apply array_aggr array_aggregate array_apply array_cat array_concat
    array_contains array_cosine_distance array_cosine_similarity array_cross_product array_distance array_distinct
    array_dot_product array_extract array_filter array_grade_up array_has array_has_all array_has_any
    array_indexof array_inner_product array_intersect array_length array_negative_dot_product
    array_negative_inner_product array_position array_reduce array_resize array_reverse_sort array_select
    array_slice array_sort array_to_json array_transform array_unique array_value array_where array_zip ascii asin
    asinh atan atan2 atanh bar base64 bin binom bit_count bit_length bit_position bitstring can_cast_implicitly
    cardinality cast_to_type cbrt ceil ceiling char_length character_length chr concat concat_ws constant_or_null
    contains cos cosh cot create_sort_key damerau_levenshtein decimal_division decode degrees divide editdist3
    element_at encode ends_with enum_code enum_first enum_last enum_range enum_range_boundary epoch epoch_ms
    epoch_ns epoch_us equi_width_bins error even exp factorial filter flatten floor fmod format format_bytes
    formatreadabledecimalsize formatreadablesize from_base64 from_binary from_hex from_json from_json_strict gamma
    gcd generate_series get_bit grade_up greatest greatest_common_divisor hamming hash hex ilike_escape instr
    invoke is_histogram_other_bin isfinite isinf isnan jaccard jaro_similarity jaro_winkler_similarity json_array
    json_array_length json_contains json_deep_merge json_exists json_extract json_extract_path
    json_extract_path_text json_extract_string json_insert json_keys json_merge_patch json_merge_patch_diff
    json_normalize json_object json_pretty json_quote json_remove json_replace json_set json_strip_nulls
    json_structure json_transform json_transform_strict json_type json_valid json_value lcase lcm least
    least_common_multiple left left_grapheme len length length_grapheme levenshtein lgamma like_escape list_aggr
    list_aggregate list_apply list_cat list_concat list_contains list_cosine_distance list_cosine_similarity
    list_distance list_distinct list_dot_product list_element list_extract list_filter list_grade_up list_has
    list_has_all list_has_any list_indexof list_inner_product list_intersect list_negative_dot_product
    list_negative_inner_product list_pack list_position list_reduce list_resize list_reverse_sort list_select
    list_slice list_sort list_transform list_unique list_value list_where list_zip ln log log10 log2 lower lpad
    ltrim make_date make_time make_timestamp make_timestamp_ms make_timestamp_ns map map_concat map_contains
    map_entries map_extract map_extract_value map_from_entries map_keys map_values md5 md5_number mismatches mod
    multiply nanosecond nextafter nfc_normalize normalized_interval not_ilike_escape not_like_escape octet_length
    ord overlay parse_dirname parse_dirpath parse_filename parse_formatted_bytes parse_path path_join pi position
    pow power prefix printf radians range reduce regexp_escape regexp_extract regexp_extract_all regexp_full_match
    regexp_matches regexp_replace regexp_split_to_array remap_struct repeat replace reverse right right_grapheme
    round round_even roundbankers row row_to_json rpad rtrim set_bit sha1 sha256 sign signbit sin sinh split sqrt
    st_asbinary st_asgeojson st_astext st_aswkb st_aswkt st_crs st_geomfromgeojson st_geomfromwkb
    st_intersects_extent st_setcrs starts_with str_split str_split_regex string_split string_split_regex
    string_to_array strip_accents strlen strpos strptime struct_concat struct_contains struct_extract
    struct_extract_at struct_has struct_indexof struct_insert struct_keys struct_pack struct_position
    struct_update struct_values substr substring substring_grapheme subtract suffix switch tan tanh to_base
    to_base64 to_binary to_centuries to_days to_decades to_hex to_hours to_json to_microseconds to_millennia
    to_milliseconds to_minutes to_months to_quarters to_seconds to_timestamp to_weeks to_years translate trim
    trunc try_strptime typeof ucase unbin unhex unicode union_extract union_tag union_value unnest unpivot_list
    upper url_decode url_encode uuid_extract_timestamp uuid_extract_version variant_array_length variant_contains
    variant_exists variant_extract variant_extract_string variant_keys variant_type variant_typeof xor
    """
)

_MACROS = _words(
    """
    array_append array_pop_back array_pop_front array_prepend array_push_back array_push_front array_reverse
    array_to_string array_to_string_comma_default assert_true date_add days_in_month fdiv generate_subscripts if
    json list_any_value list_append list_approx_count_distinct list_avg list_bit_and list_bit_or list_bit_xor
    list_bool_and list_bool_or list_count list_entropy list_first list_histogram list_kurtosis list_kurtosis_pop
    list_last list_mad list_max list_median list_min list_mode list_prepend list_product list_reverse list_sem
    list_skewness list_stddev_pop list_stddev_samp list_string_agg list_sum list_var_pop list_var_samp
    map_contains_entry map_contains_value md5_number_lower md5_number_upper nullif pg_typeof regexp_split_to_table
    split_part
    """
)

EXPRESSIONS = AGGREGATES | _WINDOWS | _OPERATORS | _TIMES | _SCALARS | _MACROS
"""All functions and operators of DuckDB that a query may use outside FROM."""

# Functions that take the name of an aggregate.
_BY_NAME = frozenset(("aggregate", "array_aggr", "array_aggregate", "list_aggr", "list_aggregate"))

READERS = _words(
    """
    glob parquet_scan read_blob read_csv read_csv_auto read_json read_json_auto read_json_objects
    read_json_objects_auto read_ndjson read_ndjson_auto read_ndjson_objects read_parquet read_text
    """
)
"""Table functions that read the files named by the first argument."""

_TABLES = READERS | _words("generate_series json_each json_tree range repeat repeat_row unnest")

_CLASSES = _words(
    """
    BETWEEN CASE CAST COLLATE COLUMN_REF COMPARISON CONJUNCTION CONSTANT FUNCTION LAMBDA LAMBDA_REF OPERATOR
    POSITIONAL_REFERENCE STAR SUBQUERY TYPE WINDOW
    """
)
_FROM = _words("BASE_TABLE EMPTY EXPRESSION_LIST JOIN PIVOT SUBQUERY TABLE_FUNCTION") | set(SELECTS)
_JOINS = frozenset(("REGULAR", "NATURAL", "CROSS", "DEPENDENT", "ASOF"))


def check(statement: Statement, engine: Engine) -> None:
    """Raise UserError if a query could have another result when it is run again, or could change anything."""
    catalogue = engine.rows("SELECT lower(function_name), coalesce(stability, ''), internal FROM duckdb_functions()")
    volatile = {name for name, stability, _ in catalogue if stability == "VOLATILE"} - {"error"}
    own = {name for name, _, internal in catalogue if not internal}  # hostdev's macros
    expressions = (EXPRESSIONS | own) - volatile
    views = {name for (name,) in engine.rows("SELECT DISTINCT lower(view_name) FROM duckdb_views() WHERE internal")}
    in_from = {id(function) for function in _table_functions(statement.tree)}
    collated = {id(node) for node in _compared(statement.tree)}
    for node in walk(statement.tree):
        _check_syntax(statement, node, views)
        kind, name = node.get("class"), node.get("function_name", "").lower()
        if kind == "COLUMN_REF" and len(node["column_names"]) == 1 and node["column_names"][0].lower() in _CLOCKS:
            raise changing(statement.where(node), node["column_names"][0].lower())
        if kind == "COLLATE" and id(node) not in collated:
            raise UserError(
                f"{statement.where(node)}: COLLATE makes different values equal, and which of them is kept "
                "depends on threads; it is allowed in comparisons and in ORDER BY; elsewhere, write lower() or "
                "strip_accents()"
            )
        if kind not in ("FUNCTION", "WINDOW"):
            continue
        if id(node) in in_from:
            if name not in _TABLES:
                raise UserError(
                    f"{statement.where(node)}: {shown(name)}() in FROM is refused, because only functions "
                    "that read the query's files or make rows are allowed: read_csv(), read_json(), read_parquet(), "
                    "read_text(), range(), unnest() and their kind"
                )
        elif name in CHANGING or (name == "age" and len(node["arguments"]) == 1):
            raise changing(statement.where(node), name)
        elif name not in expressions:
            raise UserError(
                f"{statement.where(node)}: {shown(name)}() is not a function that hostdev allows in a "
                "query, because nothing says that it has the same value in each run and changes nothing; compute the "
                "column with other functions, or before, in a file"
            )
        elif name in WINDOWS and any(one.get("class") == "COLUMN_REF" for one in walk(node["arguments"][3:])):
            raise UserError(f"{statement.where(node)}: {name}() takes the number of items as a constant")
        elif name in _BY_NAME and not _names_an_aggregate(node):
            raise UserError(f"{statement.where(node)}: {name}() needs the name of an aggregate as text, such as 'sum'")


def changing(where: str, name: str) -> UserError:
    """Return the error for a function whose value changes between runs."""
    instead = CHANGING.get(name, CHANGING["now"])
    return UserError(
        f"{where}: {name}() has a different value in each run, which would change the data set; write {instead}"
    )


def shown(name: str) -> str:
    """Return a name for messages, printable and at most 60 characters long."""
    return printable(name, 60)


def _check_syntax(statement: Statement, node: Node, views: set[str]) -> None:
    """Raise UserError if a node's syntax is refused; `views` has the names of DuckDB's own views."""
    if node.get("sample") is not None:
        raise UserError(
            "the query: the rows of a sample (USING SAMPLE, TABLESAMPLE) depend on the number of threads; select "
            "rows by a value, such as WHERE draw(id, 2020) < 0.1"
        )
    refused = ""
    if "class" in node and node["class"] not in _CLASSES:
        refused = str(node["class"])
    elif node.get("export_state"):
        refused = "EXPORT_STATE"
    elif node.get("at_clause"):
        refused = "AT"
    elif node.get("key_targets"):
        refused = "USING KEY, which keeps any row of a key,"
    elif node.get("type") == "JOIN" and node["ref_type"] not in _JOINS:
        refused = f"{node['ref_type']} JOIN, which pairs rows by their order,"
    elif node.get("class") == "TYPE" and any("collat" in str(key) and value for key, value in node.items()):
        refused = "a type with COLLATE"
    for key in ("from_table", "left", "right", "source"):
        child = node.get(key)
        if isinstance(child, dict) and "class" not in child and child.get("type") not in _FROM:
            refused = str(child.get("show_type") or child.get("type"))
    tables = [table_name(node)] if node.get("type") == "BASE_TABLE" else []
    tables += [one["key"] for one in (node.get("cte_map") or {}).get("map", ())]
    for table in tables:
        if table.lower().rpartition(".")[2] in views:
            refused = f"the table {table} of the database"
    if refused:
        raise UserError(
            f"{statement.where(node)}: {shown(refused)} is refused; use SELECT with FROM, JOIN, WHERE, "
            "GROUP BY, windows, UNION and WITH over files"
        )


def _table_functions(tree: Node) -> Iterator[Node]:
    return (node["function"] for node in walk(tree) if node.get("type") == "TABLE_FUNCTION")


def _compared(tree: Node) -> Iterator[Node]:
    """Yield the expressions in comparisons and in ORDER BY."""
    for node in walk(tree):
        if node.get("class") == "COMPARISON":
            yield node["left"]
            yield node["right"]
        elif "null_order" in node:
            yield node["expression"]


def _names_an_aggregate(node: Node) -> bool:
    """Return whether the second argument of a function is the name of an aggregate that a query may use."""
    given = [one["expression"] for one in node["arguments"]]
    literal = given[1].get("literal", {}) if len(given) > 1 else {}
    return literal.get("kind") == "STRING" and literal["text"].lower() in AGGREGATES
